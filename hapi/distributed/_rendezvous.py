"""How the machines of a launch find each other, agree on their order, and hear of each other's end.

torch's dynamic c10d rendezvous does the finding. Added here: errors that say what to do, an order that follows
``--ips`` or ``--node_rank`` (c10d sorts address strings), a fresh store for the ranks in every round (torch
keeps one, and after a restart Gloo finds keys of dead ranks there), and news between the launchers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from hapi.distributed._blame import Failure
from hapi.distributed._logs import tell

__all__ = ["LaunchError", "Peers", "Rendezvous", "Watchdog", "is_local", "open_store", "own_address"]


class LaunchError(RuntimeError):
    """The launch cannot go on; the text says why and what to do."""


def is_local(host: str) -> bool:
    """Whether ``host`` is an address of this machine: one that a socket here can be bound to.

    Raises:
        LaunchError: The name cannot be resolved.
    """
    for family, address in _resolve(host, 0):
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind(address)
            return True
    return False


def _resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as exc:
        raise LaunchError(f"host {host!r} cannot be resolved ({exc.strerror})") from exc
    return [(family, address) for family, _, _, _, address in found]


def own_address(host: str, port: int) -> str:
    """The address of this machine from which ``host`` is reached. Sends nothing.

    Raises:
        LaunchError: The name cannot be resolved, or there is no route.
    """
    family, address = _resolve(host, port)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except OSError as exc:
            raise LaunchError(f"master {host}:{port} cannot be reached from here: {exc.strerror}") from exc
        return str(probe.getsockname()[0])


def open_store(host: str, port: int, *, serve: bool, timeout: float, read_timeout: float) -> TCPStore:
    """The store that the launchers share: served by the master's, reached by the others.

    Args:
        host: Host of the master.
        port: Its port; 0 for a free one (one machine).
        serve: Whether this machine is the master.
        timeout: Seconds to wait for a master that is not there yet.
        read_timeout: Seconds that one operation may take.

    Raises:
        LaunchError: The port is taken, the master cannot be reached, or something else answers there.
    """
    if serve and port:
        _check_free(port)
    if not serve:
        _wait_for_master(host, port, timeout)
    try:
        connecting = timedelta(seconds=min(10.0, read_timeout))
        store = TCPStore(host, port, is_master=serve, timeout=connecting, wait_for_workers=False)
        store.set_timeout(timedelta(seconds=read_timeout))
        return store
    except (RuntimeError, ValueError) as exc:
        what = f"cannot listen on {host}:{port}" if serve else f"{host}:{port} answers, but not as a launcher"
        raise LaunchError(f"{what}: {str(exc).splitlines()[0]}") from exc


def _check_free(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as exc:
            raise LaunchError(
                f"port {port} of this machine cannot be used ({exc.strerror}); choose another one with "
                "--master host:port or --master_port, the same on all machines; if the master runs on "
                "this machine already, give each launch its --node_rank"
            ) from exc


def _wait_for_master(host: str, port: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    told = False
    while True:
        try:
            with socket.create_connection((host, port), timeout=min(5.0, max(0.1, timeout))):
                return
        except OSError as exc:
            reason = exc.strerror or str(exc)
            hopeless = isinstance(exc, socket.gaierror) or exc.errno in (
                errno.EHOSTUNREACH,
                errno.ENETUNREACH,
            )
        if hopeless or time.monotonic() > deadline:
            waited = "" if hopeless else f" within {timeout:g} s"
            raise LaunchError(
                f"master {host}:{port} cannot be reached{waited} ({reason}); start the launch on that "
                "machine, and check the address, the port and the firewall"
            )
        if not told:
            tell(f"hapi.launch: waiting up to {timeout:g} s for master {host}:{port} ({reason})")
            told = True
        time.sleep(min(1.0, timeout / 10))


class Watchdog:
    """Calls a function when a guarded piece of code takes too long: a cut link leaves store calls hanging.

    Args:
        timeout: Seconds.
        on_expiry: Called once, from another thread.
    """

    def __init__(self, timeout: float, on_expiry: Callable[[], None]) -> None:
        self._timeout = timeout
        self._on_expiry = on_expiry
        self._deadline: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="launch watchdog", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """In this context the clock runs."""
        self._deadline = time.monotonic() + self._timeout
        try:
            yield
        finally:
            self._deadline = None

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(0.5):
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                self._on_expiry()
                return


class Peers:
    """News between the launchers of one round: who failed, who is done, who has fallen silent.

    Args:
        store: A store of this round.
        index: This machine's place.
        count: Number of machines.
        timeout: Seconds of silence after which a machine counts as lost.
        watchdog: Guards the store's calls.
    """

    def __init__(self, store: Store, index: int, count: int, timeout: float, watchdog: Watchdog) -> None:
        self._store = store
        self._index = index
        self._count = count
        self._timeout = timeout
        self._watchdog = watchdog
        self._beats = 0
        self._next_beat = 0.0
        self._seen = {peer: (-1, time.monotonic()) for peer in range(count) if peer != index}

    def trouble(self) -> str | None:
        """Why this machine has to stop: None, ``"failed"`` elsewhere, or the text of a lost machine."""
        if self._count == 1:
            return None
        return "failed" if self._has("hapi/failed") else self._beat()

    def _beat(self) -> str | None:
        now = time.monotonic()
        if now < self._next_beat:
            return None
        self._next_beat = now + min(2.0, self._timeout / 4)
        self._beats += 1
        self._set(f"hapi/beat/{self._index}", str(self._beats))
        for peer, (beats, since) in self._seen.items():
            key = f"hapi/beat/{peer}"
            latest = int(self._get(key)) if self._has(key) else -1
            if latest != beats:
                self._seen[peer] = (latest, now)
            elif now - since > self._timeout:
                return f"machine {peer} has not answered for {self._timeout:g} s"
        return None

    def exchange(self, failures: Sequence[Failure], patience: float = 6.0) -> list[Failure]:
        """Tell the others of this machine's failures, and return those of all machines that answer."""
        if self._count == 1:
            return list(failures)
        self._set(f"hapi/failures/{self._index}", json.dumps([dataclasses.asdict(one) for one in failures]))
        self._set("hapi/failed", "1")
        keys = [f"hapi/failures/{peer}" for peer in range(self._count)]
        deadline = time.monotonic() + patience
        while not self._has(*keys) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [Failure(**values) for key in keys if self._has(key) for values in json.loads(self._get(key))]

    def done(self) -> bool:
        """Say that this machine's ranks are done (first call); whether all machines' are."""
        mine = f"hapi/done/{self._index}"
        if not self._has(mine):
            self._set(mine, "1")
        return self._has(*(f"hapi/done/{peer}" for peer in range(self._count)))

    def leave(self, *, last: bool, patience: float = 5.0) -> None:
        """Say that this machine needs the store no more; the one that holds it waits for the others."""
        if self._count == 1:
            return
        self._set(f"hapi/left/{self._index}", "1")
        keys = [f"hapi/left/{peer}" for peer in range(self._count)]
        deadline = time.monotonic() + patience
        while last and not self._has(*keys) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _set(self, key: str, value: str) -> None:
        with self._watchdog.guard():
            self._store.set(key, value)

    def _get(self, key: str) -> bytes:
        with self._watchdog.guard():
            return bytes(self._store.get(key))

    def _has(self, *keys: str) -> bool:
        with self._watchdog.guard():
            return bool(self._store.check(list(keys)))


class Rendezvous(RendezvousHandler):
    """The machines' meeting point, one round per start of the ranks.

    Args:
        store: What :func:`open_store` gave.
        serve: Whether this machine holds it.
        min_nodes: Fewest machines.
        max_nodes: Most machines.
        address: This machine's address, as the others see it.
        place: Where this machine wants to stand among the others; None leaves it to c10d.
        timeout: Seconds to wait for the others.
        peer_timeout: See :class:`Peers`.
        watchdog: See :class:`Peers`.
    """

    def __init__(
        self,
        store: TCPStore,
        *,
        serve: bool,
        min_nodes: int,
        max_nodes: int,
        address: str,
        place: int | None,
        timeout: float,
        peer_timeout: float,
        watchdog: Watchdog,
    ) -> None:
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint="",
            run_id="hapi",
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            local_addr=address,
            join_timeout=max(1, round(timeout)),
            last_call_timeout=5,
        )
        self._inner = create_handler(store, C10dRendezvousBackend(store, "hapi"), parameters)
        self._serve = serve
        self._alone = max_nodes == 1
        self._address = address
        self._place = place
        self._peer_timeout = peer_timeout
        self._watchdog = watchdog
        self._ranks_store: TCPStore | None = None
        self.peers: Peers | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other machines; see the base class."""
        self._ranks_store = None  # closes the last round's port
        meeting = self._inner.next_rendezvous()
        index = self._ordered(meeting)
        if index == 0:
            self._ranks_store = TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
            meeting.store.set("hapi/ranks_store", json.dumps([self._address, self._ranks_store.port]))
        master, port = json.loads(meeting.store.get("hapi/ranks_store"))
        self.peers = Peers(meeting.store, index, meeting.world_size, self._peer_timeout, self._watchdog)
        return RendezvousInfo(meeting.store, index, meeting.world_size, RendezvousStoreInfo(master, port))

    def _ordered(self, meeting: RendezvousInfo) -> int:
        """This machine's index: by the places that the machines want, then as c10d has them."""
        if meeting.world_size == 1:
            return 0
        meeting.store.set(f"hapi/place/{meeting.rank}", json.dumps([self._place, self._address]))
        wanted = [json.loads(meeting.store.get(f"hapi/place/{peer}")) for peer in range(meeting.world_size)]
        if self._place is not None:
            same = [address for place, address in wanted if place == self._place]
            if len(same) > 1:
                raise LaunchError(
                    f"{len(same)} machines ({', '.join(same)}) have the place {self._place}; give each its "
                    "own --node_rank, from 0, or let --ips name each machine once"
                )
        order = sorted(
            range(meeting.world_size), key=lambda peer: (wanted[peer][0] is None, wanted[peer][0] or 0, peer)
        )
        return order.index(meeting.rank)

    def num_nodes_waiting(self) -> int:
        """Machines that want to join; see the base class."""
        if self._alone:
            return 0
        with self._watchdog.guard():
            return self._inner.num_nodes_waiting()

    @property
    def use_agent_store(self) -> bool:
        """The ranks use the launcher's store: its port is open before they start."""
        return True

    def get_backend(self) -> str:
        """See the base class."""
        return self._inner.get_backend()

    def is_closed(self) -> bool:
        """See the base class."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """See the base class."""
        self._inner.set_closed()

    def get_run_id(self) -> str:
        """See the base class."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """Close the meeting, and leave it so that no machine finds the store gone; see the base class."""
        with self._watchdog.guard():
            closed = self._inner.shutdown()
        if self.peers is not None:
            self.peers.leave(last=self._serve)
        return closed
