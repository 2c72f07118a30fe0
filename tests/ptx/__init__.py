"""Runs the PTX that Triton compiles for sm_80 in numpy, and finds races and bad memory accesses.

    parser.py        PTX text -> basic blocks of instructions
    instructions.py  one instruction -> one or a few lines of numpy
    warp.py          what the threads of a warp do together: mma, ldmatrix, shuffles
    memory.py        global and shared memory with their detectors; cp.async
    launcher.py      compile a Triton kernel, run its grid, copy results back into the tensors

The thread blocks of a grid run as one gang: every PTX instruction is one numpy operation over all threads of
all blocks. Where blocks disagree about a branch the gang is split. Threads of one block must agree.
"""
