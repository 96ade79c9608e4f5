"""`./run_and_time.sh llama2_70b_lora merge ...`: write a checkpoint with the trained adapters merged into it."""

import sys

from common.model.peft_adapter import main

if __name__ == "__main__":
    sys.exit(main(["merge", *sys.argv[1:]]))
