"""Two sides, compared for a rollout: acceptance with an interval, drift by domain and position, speed, and what is missing.

Flow: certificate, pair or golden → `Side` (sides) → `compare` (difference, pure) → `Comparison`.
"""
