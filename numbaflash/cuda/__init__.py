"""CUDA kernels and what compiles, describes and launches them; importing it does not need a GPU."""
