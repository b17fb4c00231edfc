"""Measurements: what ``bench.py`` runs, one file per subcommand.

The rest of the package does not import it. Peers (torch, jax, onnxruntime) and matplotlib are used where
installed.
"""
