"""The model's arithmetic on a CPU, compiled for this machine: matrix tiles by LLVM, the rest by numba."""
