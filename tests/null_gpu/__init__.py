"""A stand-in for a GPU: PyTorch, Triton and the trainer run on cuda:0 of a machine without a card.

One library (null_gpu.cpp) answers the calls of the CUDA runtime, driver, NVML, cuDNN and cuBLAS. Every call
succeeds, kernels do nothing, memory is address space with a limit, and everything that the host reads back is
zero. The dispatcher, autograd, the caching allocator, PyTorch's use of cuDNN, Triton's compiler and Inductor
are real.

It shows which code runs, launches, copies, synchronizations, layouts, allocated and reserved memory, retries
and out-of-memory errors under a limit, whether kernels compile, and host time as a ratio of two things in one
run. It cannot show results, the speed of a card, or cuDNN's own choices and workspaces.

`python -m tests.null_gpu COMMAND...` runs any command with it.
"""
