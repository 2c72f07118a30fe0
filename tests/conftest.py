"""One thread a worker: tests are many and small, and run side by side."""

import torch

torch.set_num_threads(1)
