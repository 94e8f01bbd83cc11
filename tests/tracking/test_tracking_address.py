"""Addresses that work, addresses that are refused with a sentence, and passwords that are never shown."""

import os
import socket
import sqlite3

import pytest

from dpray.platform.tracking import TrackingAddressError, check_uri, shown
from dpray.platform.tracking.address import LOCKED, probe


@pytest.mark.parametrize("uri", ["http://127.0.0.1:5000", "https://mlflow.example.org", "postgresql+psycopg://u@h/n"])
def test_servers_and_databases_are_taken_as_they_are(uri):
    assert check_uri(uri) == check_uri(uri, cluster=True) == uri


def test_a_relative_sqlite_path_is_pinned_to_the_present_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_uri("sqlite:///mlflow.db") == f"sqlite:///{tmp_path}/mlflow.db"
    assert check_uri(f"sqlite:///{tmp_path}/a.db", cluster=True) == f"sqlite:///{tmp_path}/a.db"


def test_a_relative_sqlite_path_is_refused_on_a_cluster():
    with pytest.raises(TrackingAddressError, match="another file on every node"):
        check_uri("sqlite:///mlflow.db", cluster=True)


@pytest.mark.parametrize("uri", ["mlruns", "./mlruns", "/tmp/mlruns", "file:mlruns", "file:///tmp/mlruns"])
def test_folders_are_refused(uri):
    with pytest.raises(TrackingAddressError, match=r"folder.*use sqlite:///mlflow\.db"):
        check_uri(uri)


@pytest.mark.parametrize("uri", ["sqlite://", "sqlite:///", "sqlite:///:memory:"])
def test_sqlite_without_a_file_is_refused(uri):
    with pytest.raises(TrackingAddressError, match="names no file"):
        check_uri(uri)


@pytest.mark.parametrize("uri", ["ftp://host/x", "http://", "databricks://profile"])
def test_other_addresses_are_refused(uri):
    with pytest.raises(TrackingAddressError, match="no address of MLflow"):
        check_uri(uri)


def test_a_refusal_hides_the_password():
    with pytest.raises(TrackingAddressError) as refusal:
        check_uri("ftp://me:hunter2@host/x")
    assert "hunter2" not in str(refusal.value)


def test_passwords_are_masked_wherever_an_address_stands():
    assert shown("at postgresql://me:p:w@h/x now") == "at postgresql://me:***@h/x now"
    assert shown("http://h:5000/a@b") == "http://h:5000/a@b"


def test_a_closed_port_is_refused_and_not_waited_for():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):  # a wait would end in a TimeoutError
        probe(f"http://127.0.0.1:{port}")


def test_an_open_port_and_a_free_file_pass(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        probe(f"http://127.0.0.1:{listener.getsockname()[1]}")
    probe(f"sqlite:///{tmp_path}/new/mlflow.db")
    assert not (tmp_path / "new" / "mlflow.db").exists()


def test_a_locked_file_is_told_from_a_broken_one(tmp_path):
    path = tmp_path / "m.db"
    with sqlite3.connect(path, isolation_level=None) as holder:
        holder.execute("CREATE TABLE t (x)")
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(OSError, match=LOCKED):
            probe(f"sqlite:///{path}")
        holder.execute("ROLLBACK")
        probe(f"sqlite:///{path}")
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"this is no database" * 100)
    with pytest.raises(OSError, match="not a database"):
        probe(f"sqlite:///{broken}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_found(tmp_path):
    (tmp_path / "shut").mkdir(mode=0o500)
    with pytest.raises(PermissionError):
        probe(f"sqlite:///{tmp_path}/shut/m.db")
