"""Goldens: what a pair did once, layer by layer, so that a later run says which layer changed first, and whether it matters.

Note [Orthogonal layers]: each layer is asked with the *recorded* outcome of the layers above it: log-probabilities over
recorded ids, decodes of recorded prompts under recorded parameters, the behaviour of recorded outputs. So a change in one
layer doesn't show in the next, unless the next really depends on it; and two changes are found side by side.
Flow: pair → `capture` → `Recording` (old and new) → `attribution` → `GoldenReport`.
"""
