"""PPO for perceptrons on the CPU, by kernels that numba compiles."""
