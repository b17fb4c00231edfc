"""Measurements: what ``bench.py`` runs, one file per subcommand.

Not imported by the rest of the package. Peers (torch, jax, onnxruntime) and matplotlib are used where installed.
"""
