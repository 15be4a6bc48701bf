"""The key-value store of Ray's head, as far as the registry uses it."""

from __future__ import annotations

from ray.exceptions import RpcError


class FakeStore:
    """ray.experimental.internal_kv. While `is_away`, every call fails as it does without a head."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.is_away = False

    def _internal_kv_put(self, key: str, value: str, *, namespace: str) -> bool:
        self._answer()
        self.values[key.encode()] = value.encode()
        return True

    def _internal_kv_del(self, key: str, *, namespace: str) -> int:
        self._answer()
        return int(self.values.pop(key.encode(), None) is not None)

    def _internal_kv_get(self, key: bytes, *, namespace: str) -> bytes | None:
        self._answer()
        return self.values.get(key)

    def _internal_kv_list(self, prefix: str, *, namespace: str) -> list[bytes]:
        self._answer()
        return [key for key in list(self.values) if key.startswith(prefix.encode())]

    def _answer(self) -> None:
        if self.is_away:
            raise RpcError("failed to connect to GCS")
