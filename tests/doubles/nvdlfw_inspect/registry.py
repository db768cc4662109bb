"""Features by namespace; they wait for ``api.initialize``."""

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass
class NamespaceData:
    features: dict = field(default_factory=dict)
    deferred_features: list = field(default_factory=list)


class Registry:
    data: ClassVar[dict[str, NamespaceData]] = {}

    @classmethod
    def register_feature(cls, namespace):
        def register(feature):
            cls.data.setdefault(namespace, NamespaceData()).deferred_features.append(feature)
            return feature

        return register


def api_method(function):
    function.is_api = True
    return function
