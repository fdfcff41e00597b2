"""What the tools of Macs with Thunderbolt 5 print, by Apple's technote TN3205, and stand-ins for
them. In these tests the interface between two hosts is the loopback, lo."""

from pathlib import Path

DEVICES = """device                 node GUID
------              ----------------
rdma_lo             e0c5797d9c8fac05
rdma_en3            e1c5797d9c8fac05
"""
PORTS = """hca_id: rdma_lo
        transport:                      Thunderbolt (100)
        phys_port_cnt:                  1
                port:   1
                        state:                  PORT_ACTIVE (4)
                        max_mtu:                4096 (5)

hca_id: rdma_en3
        transport:                      Thunderbolt (100)
        phys_port_cnt:                  1
                port:   1
                        state:                  PORT_DOWN (1)
                        max_mtu:                4096 (5)
"""


def make_tool(folder: Path, name: str, output: str) -> None:
    """Makes a program that prints the output. It has to be found before the real one."""
    (folder / name).write_text(f"#!/bin/sh\ncat <<'EOF'\n{output}\nEOF\n")
    (folder / name).chmod(0o755)
