"""Titles of sections of NVIDIA's "Parallel Thread Execution ISA", by which opcodes cite it: unlike the
numbers, they stay the same from version to version. A title with commas stands for one section each."""

INTEGER = "Integer Arithmetic Instructions: "
EXTENDED = "Extended-Precision Arithmetic Instructions: "
FLOAT = "Floating Point Instructions: "
HALF = "Half Precision Floating Point Instructions: "
COMPARE = "Comparison and Selection Instructions: "
LOGIC = "Logic and Shift Instructions: "
MOVE = "Data Movement and Conversion Instructions: "
CONTROL = "Control Flow Instructions: "
SYNC = "Parallel Synchronization and Communication Instructions: "
MISC = "Miscellaneous Instructions: "
HALF_COMPARE = "Half Precision Comparison Instructions: "
MATRIX = {
    "ldmatrix": "Warp-level matrix load instruction: ldmatrix",
    "stmatrix": "Warp-level matrix store instruction: stmatrix",
    "movmatrix": "Warp-level matrix transpose instruction: movmatrix",
    "mma": "Multiply-and-Accumulate Instruction: mma",
}
