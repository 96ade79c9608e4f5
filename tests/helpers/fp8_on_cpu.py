"""Without a GPU, FP8 products by torch's own code: oneDNN takes 600 times as long on a Xeon with
AMX for int8 and bf16 (torch 2.13).
"""

import torch

multiply = torch._scaled_mm


def without_onednn(*operands, **options):
    torch.backends.mkldnn.enabled = False
    try:
        return multiply(*operands, **options)
    finally:
        torch.backends.mkldnn.enabled = True


if not torch.cuda.is_available():
    torch._scaled_mm = without_onednn
