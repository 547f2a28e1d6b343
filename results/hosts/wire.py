"""A wire between two network namespaces: wire.py FIRST SECOND DELAY_MS

Makes a tap device in each namespace (10.9.0.1 and 10.9.0.2), and passes each frame on to the other
after DELAY_MS milliseconds. Prints "ready", and runs until it is killed. Needs root.
"""

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
TAP_WITHOUT_HEADER = 0x1002
SPIN_S = 5e-4  # seconds before a frame is due from which on the loop polls without sleeping


def tap(number: int, namespace: str) -> int:
    """Opens the tap device of a namespace, and returns its file descriptor."""
    name = f"wire{number}"
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", name.encode(), TAP_WITHOUT_HEADER))
    within = f"ip netns exec {namespace} ip"
    for command in (
        f"ip link set {name} netns {namespace}",
        f"{within} addr add 10.9.0.{number + 1}/24 dev {name}",
        f"{within} link set {name} up",
        f"{within} link set lo up",
    ):
        subprocess.run(command.split(), check=True)
    return descriptor


def main() -> None:
    ends = [tap(number, namespace) for number, namespace in enumerate(sys.argv[1:3])]
    delay_s = float(sys.argv[3]) / 1e3
    frames = deque[tuple[float, int, bytes]]()  # (when due, to which end, bytes), in order
    print("ready", flush=True)
    while True:
        while frames and frames[0][0] <= time.perf_counter():
            _, to, frame = frames.popleft()
            os.write(ends[to], frame)
        left = frames[0][0] - time.perf_counter() if frames else 1.0
        sleep_s = 0.0 if left < SPIN_S else left - SPIN_S / 2
        for end in select.select(ends, [], [], max(0.0, sleep_s))[0]:
            frame = os.read(end, 1 << 16)
            to = 1 - ends.index(end)
            frames.append((time.perf_counter() + delay_s, to, frame))


if __name__ == "__main__":
    main()
