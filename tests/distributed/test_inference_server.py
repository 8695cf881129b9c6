"""The inference server: which version of the weights it uses."""

import threading
from typing import Any

import numpy as np

from bestiary.config.resolve import resolve
from bestiary.distributed.inference_server import InferenceServer
from bestiary.distributed.serialisation import to_arrays
from bestiary.distributed.shipped_config import ShippedConfig
from tests.distributed.helpers import SMALL


def test_requests_wait_for_their_minimum_version_and_use_the_newest_weights() -> None:
    config = resolve({**SMALL, "env": "toy/catch"})
    agents = [config.make_agent(seed=seed) for seed in range(3)]
    server = InferenceServer()
    server.setup(ShippedConfig.from_config(config), use_gpu=False)
    results: dict[int, Any] = {}  # by minimum version
    zeros = np.zeros((1, 2), np.int64)
    inputs = {
        "observation": {
            kind: np.zeros((1, 2, *s.shape), s.dtype) for kind, s in config.interface.observation_spec.items()
        },
        "reward": zeros.astype(np.float32),
        "done": zeros > 0,
        "last_action": zeros,
        "task": zeros,
    }

    def request(min_version: int) -> threading.Thread:
        def infer() -> None:
            results[min_version] = server.infer(min_version, inputs, [])

        thread = threading.Thread(target=infer, daemon=True)
        thread.start()
        return thread

    def set_weights(version: int) -> None:
        server.set_weights(version, to_arrays(list(agents[version].state_dict().values())))

    second = request(2)
    set_weights(1)
    request(1).join(timeout=60)
    assert results[1][0] == 1
    assert 2 not in results  # this request waits for newer weights
    set_weights(2)
    set_weights(0)  # arrives late and is ignored
    second.join(timeout=60)
    request(0).join(timeout=60)
    assert results[2][0] == results[0][0] == 2
    assert np.array_equal(results[2][1], results[0][1])
    assert not np.array_equal(results[2][1], results[1][1])
