"""C kernels for the CPU and the loader that compiles them at first use."""
