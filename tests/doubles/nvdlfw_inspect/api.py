"""``debug_api``."""

from nvdlfw_inspect.registry import Registry

DEBUG_MANAGER = None


class DebugManager:
    def __init__(self, feature) -> None:
        self.feature = feature
        self.iteration = 0

    def ask(self, layer, gemm) -> bool:
        if self.feature is None:
            return True
        call = Registry.data["transformer_engine"].features[self.feature].fp8_gemm_enabled
        assert call.is_api
        enabled, next_iteration = call({}, layer_name=layer, gemm=gemm, iteration=self.iteration)
        assert next_iteration == self.iteration + 1
        return enabled


def initialize(feature=None) -> None:
    """Configure a feature for every layer, in place of the configuration file; None configures none."""
    global DEBUG_MANAGER  # noqa: PLW0603 (as there)
    for known in Registry.data.values():
        known.features |= {each.__name__: each() for each in known.deferred_features}
        known.deferred_features.clear()
    DEBUG_MANAGER = DebugManager(feature)
