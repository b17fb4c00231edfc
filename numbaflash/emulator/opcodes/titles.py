"""Titles of sections of NVIDIA's "Parallel Thread Execution ISA", by which opcodes cite it: unlike the
numbers, they stay the same from version to version."""

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
