"""Kernels in C++, built just in time with the compiler of the machine; what cannot be built is done by torch."""
