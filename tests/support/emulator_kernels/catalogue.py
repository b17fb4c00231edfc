"""All kernels by name: a case is made by ``CASES[name](rng)``."""
from emulator_kernels import classic, flash_simt, pipelines, tensor_cores

CASES = {
    "reduction": classic.reduction_case,
    "grid_reduction": classic.grid_reduction_case,
    "scan": classic.scan_case,
    "matmul": classic.matmul_case,
    "histogram": classic.histogram_case,
    "stencil": classic.stencil_case,
    "matmul_mma": tensor_cores.matmul_mma_case,
    "flash_simt": flash_simt.flash_simt_case,
    "flash_mma": tensor_cores.flash_mma_case,
    "mbarrier_pipeline": pipelines.mbarrier_pipeline_case,
    "mbarrier_spin_pipeline": pipelines.mbarrier_spin_pipeline_case,
    "async_pipeline": pipelines.async_pipeline_case,
    "named_barrier_pipeline": pipelines.named_barrier_pipeline_case,
}
