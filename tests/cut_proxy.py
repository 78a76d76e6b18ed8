"""A TCP proxy on the loopback between a client and a server that loses or delays what it is told to."""

import contextlib
import socket
import threading


class Proxy:
    """Forwards to a port. `plan` says for each request from now on what becomes of it, then all pass again:

    "lose": it never arrives; "mute": it arrives, its reply is lost; "half": of its reply, only some bytes arrive;
    after each of them the connection is cut; "hang": it arrives, its reply never comes.
    """

    def __init__(self, port):
        self.target, self.plan, self.requests = port, [], 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}"

    def close(self):
        for connection in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                connection.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
                self._open += [client, server]
                threading.Thread(target=self._serve, args=(client, server), daemon=True).start()

    def _serve(self, client, server):
        """One request, one reply: as this package talks."""
        with contextlib.suppress(OSError), client, server:
            while request := client.recv(1 << 20):
                fate = "pass"
                if b"EVAL" in request[:40]:
                    self.requests += 1
                    fate = self.plan.pop(0) if self.plan else "pass"
                if fate == "lose":
                    return
                server.sendall(request)
                reply = server.recv(1 << 20)
                if fate == "mute":
                    return
                if fate == "half":
                    return client.sendall(reply[: len(reply) // 2])
                if fate == "hang":
                    client.recv(1)  # until the client gives up
                    return
                client.sendall(reply)
