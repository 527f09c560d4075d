"""Settings of all tests."""

import torch

# Tests run side by side in processes; OpenMP threads of one would spin while another computes.
torch.set_num_threads(1)
