"""What a member of a group finds in its environment: the variables that torchrun would set."""

from __future__ import annotations

from collections.abc import Mapping


def contract(
    rank: int, size: int, port: int, *, restarts: int, max_restarts: int, run_id: str, env: Mapping[str, str]
) -> dict[str, str]:
    """The variables of one member, on one machine, added to those of the job."""
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(size))
    usual = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"} | ({"OMP_NUM_THREADS": "1"} if size > 1 else {})
    return {
        **usual,
        **env,
        **ranks,
        **sizes,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        # Nobody but rank 0 keeps a store.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
