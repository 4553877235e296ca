"""A backend of Triton's for CPUs, which compiles nothing: with TRITON_INTERPRET=1 NumPy runs the kernels.

vLLM's model runner V2, which engines have on GPUs, is made of such kernels, and asks for nothing else of a GPU. On a
CPU it takes Triton for present where a backend of this name is.
"""
