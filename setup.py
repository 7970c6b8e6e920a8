"""Builds the C core; everything else about the package is in pyproject.toml."""

import os

from setuptools import Extension, setup

flags = ["-std=c11", "-O3", "-Wall", "-Wextra", "-Wno-missing-field-initializers"]
link: list[str] = []
# PENSTOCK_SANITIZE=address,undefined builds the core for `make sanitize`.
if sanitizers := os.environ.get("PENSTOCK_SANITIZE"):
    flags += [f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer", "-g", "-O1"]
    link += [f"-fsanitize={sanitizers}"]

setup(
    ext_modules=[
        Extension(
            name,
            [f"src/{name.replace('.', '/')}.c"],
            include_dirs=["include"],
            depends=[
                "include/penstock/ring.h",
                "src/penstock/core/decoding/_messages.h",
                "src/penstock/queue/wide/_areas.h",
                "src/penstock/queue/wide/_reader.h",
                "src/penstock/queue/wide/_writer.h",
            ],
            extra_compile_args=flags,
            extra_link_args=link,
        )
        for name in (
            "penstock.core.decoding._protobuf",
            "penstock.dispatch._headers",
            "penstock.queue.classic._appender",
            "penstock.queue.classic._rows",
            "penstock.queue.wide._ring",
            "penstock.protocols._datagrams",
            "penstock.protocols.jrtc._structs",
            "penstock.protocols.lhhttt._frames",
            "penstock.protocols.lrose._short",
            "penstock.radar._pulses",
        )
    ],
    # Where C and C++ programs find it: <prefix>/include/penstock/ring.h
    data_files=[("include/penstock", ["include/penstock/ring.h"])],
)
