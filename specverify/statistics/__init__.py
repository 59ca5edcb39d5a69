"""Tests, sequential evidence, intervals, design and error budget. NumPy and SciPy only, no torch."""
