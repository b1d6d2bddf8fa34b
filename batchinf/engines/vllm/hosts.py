"""Starts one engine whose ranks are on several hosts, as actors of a Ray cluster in a given placement group.

Tested with vLLM 0.32.0 (`RayExecutorV2`). `EngineArgs` has no field for a placement group. Without one, vLLM would make
its own, and ranks could be on the wrong nodes (ray#63328).
"""

import os
from typing import Any

from vllm import EngineArgs, LLMEngine

from batchinf.engines.protocol import RayGroup


def engine_on_hosts(group: RayGroup, arguments: EngineArgs, usage_context: Any) -> LLMEngine:
    """The counterpart of `LLMEngine.from_engine_args`.

    vLLM's core process joins the cluster as a driver of its own. So Ray ends the ranks when that process ends.
    """
    import ray
    from ray.runtime_env import RuntimeEnv
    from ray.util.placement_group import PlacementGroup

    os.environ["RAY_ADDRESS"] = group.address
    # The ranks get this process's environment. Ports and the folder for sockets were chosen for one host alone: on
    # others the folder does not exist, and ranks that search for a port from the same number on could race for it.
    for name in ("VLLM_PORT", "VLLM_RPC_BASE_PATH"):
        os.environ.pop(name, None)
    config = arguments.create_engine_config(usage_context)
    parallel = config.parallel_config
    parallel.placement_group = PlacementGroup(
        ray.PlacementGroupID(bytes.fromhex(group.group_id)), bundle_cache=list(group.bundles)
    )
    # Ranks import batchinf's extensions of vLLM before they get the environment.
    parallel.ray_runtime_env = RuntimeEnv(env_vars={"PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    return LLMEngine.from_vllm_config(
        config, usage_context=usage_context, disable_log_stats=arguments.disable_log_stats
    )
