"""trip.py ADDRESS: answers on the port 4600 of ADDRESS, byte for byte, until the caller leaves.
trip.py ADDRESS from: calls that port, and prints the median round trip in ms of 300 bytes."""

import socket
import sys
import time
from statistics import median

PORT, TRIPS, SIZE = 4600, 200, 300


def answer(address: str) -> None:
    with socket.create_server((address, PORT)) as server:
        caller, _ = server.accept()
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := caller.recv(SIZE):
            caller.sendall(data)


def trip(line: socket.socket) -> float:
    start = time.perf_counter()
    line.sendall(bytes(SIZE))
    left = SIZE
    while left:
        left -= len(line.recv(left))
    return 1e3 * (time.perf_counter() - start)


def call(address: str) -> float:
    line = socket.create_connection((address, PORT))
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with line:
        return median(trip(line) for _ in range(TRIPS))


if __name__ == "__main__":
    if sys.argv[2:] == ["from"]:
        print(round(call(sys.argv[1]), 3))
    else:
        answer(sys.argv[1])
