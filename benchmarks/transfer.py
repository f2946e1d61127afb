"""Measures speed and memory of sending an artifact to a store and fetching it back.

Stores: a directory (`file://`), and moto's S3 server over HTTP in its own process (`s3://`). Every operation runs in
a fresh child process; its extra memory is its peak resident size less that after opening the store. Speeds are those of
this machine's disk and, for s3, of moto: they say what a run took, not what S3 does. moto holds an object in memory for
every range that it serves, hence the artifact of several files.

    python benchmarks/transfer.py [--files 8] [--file-mib 256] [--output benchmarks/results/transfer.json]
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

from bitmill_common.artifacts import describe_files, download_files, upload_files
from bitmill_common.stores import StoreOptions, Stores

MIB = 2**20
LIMIT_MIB = 200
OPERATIONS = ("upload", "download")
BUCKET = "transfer-benchmark"
PATH = "artifact"


def main() -> None:
    """Runs all operations on both stores, prints the rows and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--file-mib", type=int, default=256)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "transfer.json")
    parser.add_argument("--work-dir", type=Path, help="where to write the files; twice their size must be free")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
    elif arguments.child:
        print(json.dumps(run_operation(**json.loads(arguments.child))))
    else:
        with tempfile.TemporaryDirectory(dir=arguments.work_dir, prefix="bitmill-transfer-") as work_dir:
            rows = measure(Path(work_dir), arguments.files, arguments.file_mib)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(rows, indent=2) + "\n")
        if any(row["extra_rss_mib"] >= LIMIT_MIB for row in rows):
            sys.exit(f"an operation took {LIMIT_MIB} MiB of extra memory or more")


def measure(work_dir: Path, files: int, file_mib: int) -> list[dict[str, Any]]:
    """Returns one row for every store and operation."""
    source = work_dir / "source"
    make_artifact(source, files, file_mib)
    rows = run_all(work_dir, source, work_dir.as_uri() + "/store", None)
    shutil.rmtree(work_dir / "store")
    server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        endpoint = server.stdout.readline().strip()
        rows += run_all(work_dir, source, f"s3://{BUCKET}", endpoint)
    finally:
        server.terminate()
        server.wait()
    return rows


def make_artifact(directory: Path, files: int, file_mib: int) -> None:
    """Writes files of random bytes."""
    directory.mkdir()
    random = Random(0)
    for index in range(files):
        with (directory / f"model-{index + 1:05}-of-{files:05}.safetensors").open("wb") as writer:
            for _ in range(file_mib):
                writer.write(random.randbytes(MIB))


def run_all(work_dir: Path, source: Path, uri: str, endpoint: str | None) -> list[dict[str, Any]]:
    """Runs every operation on one store in a child process each."""
    rows = []
    for operation in OPERATIONS:
        arguments = {"operation": operation, "uri": uri, "endpoint": endpoint, "source": str(source)}
        child = subprocess.run(
            [sys.executable, __file__, "--child", json.dumps(arguments)], check=True, stdout=subprocess.PIPE, text=True
        )
        row = json.loads(child.stdout)
        print(
            f"{row['store']:5} {row['operation']:9} {row['bytes'] / MIB:7.0f} MiB {row['seconds']:7.1f} s "
            f"{row['mib_per_s']:7.0f} MiB/s {row['extra_rss_mib']:6.0f} MiB extra memory",
            flush=True,
        )
        rows.append(row)
        shutil.rmtree(work_dir / "fetched", ignore_errors=True)
    return rows


def run_operation(operation: str, uri: str, endpoint: str | None, source: str) -> dict[str, Any]:
    """Runs one operation and returns its row. A download checks digests as it goes; those are made before the clock."""
    options = StoreOptions(
        s3_endpoint=endpoint,
        s3_region="us-east-1",
        s3_access_key_id="testing",
        s3_secret_access_key="testing",
        s3_allow_http=True,
    )
    store = Stores([uri], options).open(f"{uri}/{PATH}" if operation == "download" else uri, "uri")
    directory = Path(source)
    files = describe_files(directory)
    total = sum(file.size_bytes for file in files)
    before = read_status("VmRSS")
    started = time.perf_counter()
    if operation == "upload":
        upload_files(store, PATH, directory, files)
    else:
        download_files(store, files, directory.parent / "fetched")
    seconds = time.perf_counter() - started
    return {
        "store": uri.partition(":")[0],
        "operation": operation,
        "bytes": total,
        "seconds": round(seconds, 3),
        "mib_per_s": round(total / MIB / seconds, 1),
        "extra_rss_mib": round((read_status("VmHWM") - before) / 1024, 1),
        "versions": {name: version(name) for name in ("obstore", "moto")} | {"python": platform.python_version()},
    }


def read_status(field: str) -> int:
    """Returns a field of this process's status in KiB: VmRSS is the resident size now, VmHWM its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise LookupError(field)


def serve() -> None:
    """Runs moto's S3 server with an empty bucket, prints its endpoint and waits to be terminated."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=endpoint, **keys).create_bucket(Bucket=BUCKET)
    print(endpoint, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
