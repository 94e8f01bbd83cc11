"""Hosts are machines of their own, and leave nothing behind."""

import os
import subprocess
from pathlib import Path

import hosts


def test_hosts_have_an_address_processes_a_home_and_temporary_files_of_their_own(network):
    head, site = network["head"], network["site-a"]
    assert site.python("import socket; print(socket.gethostname())").stdout == "site-a\n"
    (head.home / "here").write_text("head's")
    assert site.run("ls", "-A").stdout == ""
    assert head.run("cat", "here").stdout == "head's"
    assert head.run("ls", "/tmp/ray").stdout == ""
    assert len(site.run("ps", "-A", "-o", "pid=").stdout.split()) == 2  # its first process, and ps


def test_they_reach_each_other_by_name_until_a_cable_is_cut(network):
    server = network["head"].begin(hosts.PYTHON, "-m", "http.server", "8000", "--bind", "10.77.0.1")
    ask = "import urllib.request as u; print(u.urlopen('http://head:8000', timeout=2).status)"
    hosts.wait(lambda: network["site-b"].python(ask, check=False).code == 0, "the server")
    network.cut("head")
    assert network["site-b"].python(ask, check=False).code != 0
    network.mend("head")
    hosts.wait(lambda: network["site-b"].python(ask, check=False).code == 0, "the mended cable")
    hosts.end(server)


def test_what_is_listened_for_on_the_bridge_is_heard(network):
    text = b"canary" * 8
    with network.listening_in(text) as heard:
        send = f"import socket; socket.socket(2, 2).sendto({text!r}, ('10.77.0.3', 9))"
        network["site-a"].python(send)
        assert heard() >= 1
    with network.listening_in(b"another") as heard:
        network["site-a"].python(send)
        assert heard() == 0


def test_a_host_without_power_loses_its_processes_and_keeps_its_files(network):
    site = network["site-a"]
    site.run("sh", "-c", "echo kept > file; setsid sleep 600 >/dev/null 2>&1 &")
    running = site.processes()
    site.power_off()
    assert not [pid for pid in running if Path(f"/proc/{pid}").exists()]
    again = network.add("site-a")
    assert again.run("cat", "file").stdout == "kept\n"
    assert again.address == site.address


def test_nothing_is_left_of_a_network_even_after_a_failure():
    if reason := hosts.missing():
        import pytest

        pytest.skip(reason)
    before = set(os.listdir("/sys/class/net"))
    try:
        with hosts.network(["one"]) as made:
            made["one"].begin("sh", "-c", "setsid sleep 600 & sleep 600")
            inside, folder = made["one"].processes(), made.folder
            raise RuntimeError("a failing test")
    except RuntimeError:
        pass
    assert not [pid for pid in inside if Path(f"/proc/{pid}").exists()]
    assert not folder.exists()
    assert set(os.listdir("/sys/class/net")) == before
    assert str(folder) not in subprocess.run(["mount"], capture_output=True, text=True, check=True).stdout
