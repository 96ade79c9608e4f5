"""Test the LoRA trainer in an emulated block format, for every storage of the base."""

import pytest
import tiny
from emulated_layers import install
from tiny import LORA

FORMAT = {"linear": "mxfp4+stochastic until step 9999, then fp8"}


def lora_steps(processes, linear, **options):
    if linear != "fp8":
        install(linear)
    return tiny.lora_steps(processes, linear=linear, **options)


def test_every_storage_of_a_base_in_fp8_gives_the_same_bits(processes):
    plain = lora_steps(processes, **FORMAT)
    for storage in ({"frozen_base": "replicated_both"}, {"offload_layers": 1}):
        found = lora_steps(processes, **FORMAT, **storage)
        assert (found["losses"], found["norms"], found["evaluation"]) == (
            plain["losses"],
            plain["norms"],
            plain["evaluation"],
        )
    assert plain["base unchanged"] and plain["losses"][-1] < plain["losses"][0]
    assert plain["losses"] != lora_steps(processes, linear="fp8")["losses"]


@pytest.mark.parametrize("then", ["fp8", "bf16"])
def test_healing_changes_the_losses_only_from_its_step_on(processes, then):
    healed = lora_steps(processes, linear=f"mxfp4 until step 3, then {then}")
    unhealed = lora_steps(processes, linear=f"mxfp4 until step 9999, then {then}")
    assert (
        healed["losses"][:3] == unhealed["losses"][:3]
        and healed["losses"][3] != unhealed["losses"][3]
    )
    assert len(healed["losses"]) == 6 and healed["base unchanged"] and LORA.lora_dropout == 0
