"""How programs asked for a sampler before `shoal.samplers.asking`."""

from shoal.samplers.asking import SamplerClient, SharedLLMInferenceManager

as_sampler = SamplerClient
__all__ = ["SharedLLMInferenceManager", "as_sampler"]
