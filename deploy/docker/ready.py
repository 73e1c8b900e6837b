"""Exit 0 if the service in this container answers with 200: the images' health check.

The first argument names the variable with its `host:port`, the second one the path that is asked
for, by default /readyz. A plain socket, because an engine runs this every few seconds: `urllib`
alone takes three times as long to import as all of this needs. With `ALLFOLD_TLS_DIR` it shows the
service's own certificate.
"""

import os
import socket
import sys


def connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=2)
    folder = os.environ.get("ALLFOLD_TLS_DIR")
    if not folder:
        return connection
    import ssl  # it takes as long to import as all the rest

    context = ssl.create_default_context(cafile=f"{folder}/ca.crt")
    context.load_cert_chain(f"{folder}/tls.crt", f"{folder}/tls.key")
    name = os.environ.get("ALLFOLD_TLS_NAME") or "allfold"
    return context.wrap_socket(connection, server_hostname=name)


def main() -> None:
    port = int(os.environ[sys.argv[1]].rpartition(":")[2])
    path = sys.argv[2] if len(sys.argv) > 2 else "/readyz"
    try:
        with connect(port) as connection:
            connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            with connection.makefile("rb") as reply:
                status, _, body = reply.read(65536).partition(b"\r\n")
    except OSError as error:
        sys.exit(f"port {port}: {error}")
    # What is printed shows in `docker inspect`: the failing check says what it waits for.
    print(body.rpartition(b"\r\n")[2].decode(errors="replace"))
    sys.exit(status.split()[1:2] != [b"200"])


if __name__ == "__main__":
    main()
