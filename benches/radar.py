"""How fast do pulses become columns, and columns moments? Each beside its yardstick, in one run.

    python benches/radar.py [--quick] [--spark]

Pulses to Arrow beside a copy of as many float32, also where metadata stands before every tenth;
moments of 64 pulses of 1,000 gates in two
polarisations beside one pass of `abs()**2` over the same samples, and beside a radar of 1,500
pulses/s; with --spark, moments in Spark on one core and on two. Times of one thread are those that
it had a core, so that a busy machine tells the same.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import open_writer
from penstock.radar import BeamMaker, DwellOptions, moments
from penstock.radar.iwrf.packets import Encoding, Kind, make
from penstock.radar.iwrf.pulses import PulseDecoder, make_pulse
from penstock.radar.pulse_pair import Receiver, moments_of

if TYPE_CHECKING:
    from collections.abc import Callable

PULSES, GATES, CHANNELS = 64, 1000, 2


def best(
    work: Callable[[], object], times: int, clock: Callable[[], float] = time.thread_time
) -> float:
    """Return the seconds of the fastest of some runs."""
    took = []
    for _ in range(times):
        began = clock()
        done = work()
        took.append(clock() - began)
        del done
    return min(took)


def metadata(time_ns: int) -> list[bytes]:
    noise: dict[str, Any] = {"noise_dbm_hc": -77, "noise_dbm_vc": -77, "receiver_gain_db_hc": 37}
    processing: dict[str, Any] = {
        "xmit_rcv_mode": 5,
        "prf_mode": 1,
        "integration_cycle_pulses": PULSES,
    }
    return [
        make(Kind.RADAR_INFO, time_ns=time_ns, wavelength_cm=10, radar_name="BENCH"),
        make(Kind.SCAN_SEGMENT, time_ns=time_ns),
        make(Kind.TS_PROCESSING, time_ns=time_ns, **processing),
        make(Kind.CALIBRATION, time_ns=time_ns, base_dbz_1km_hc=-45.5, **noise),
    ]


def packets(count: int, encoding: int, every: int = 1500) -> list[bytes]:
    """Return pulses of a radar that turns, with metadata once a second or more often."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((8, CHANNELS, GATES, 2), np.float32).view(np.complex64)[..., 0]
    found = []
    for i in range(count):
        time_ns = 1_750_000_000_000_000_000 + i * 666_667
        if not i % every:
            found += metadata(time_ns)
        header = {"pulse_seq_num": i, "prt": 0.000666667, "volume_num": 0, "sweep_num": 0}
        place = {"azimuth": i / PULSES % 360, "elevation": 1.0, "gate_spacing_m": 150.0}
        pulse = 0.01 * noise[i % 8]
        found.append(make_pulse(pulse, encoding=encoding, time_ns=time_ns, **header, **place))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    parser.add_argument("--spark", action="store_true", help="moments in Spark as well")
    given = parser.parse_args()
    # 40 MB of samples: fewer fit a cache, in which a copy is as fast as nowhere else.
    count, times = 2560, 5 if given.quick else 15

    print(f"{count:,} pulses of {GATES} gates x {CHANNELS}")
    # Ones: zeros that were never written to are all the same page, which copies faster than data.
    plain = np.ones(count * 2 * GATES * CHANNELS, np.float32)
    there = np.ones_like(plain)
    copied = best(lambda: np.copyto(there, plain), times)
    for encoding, every, wanted in (
        (Encoding.FL32, 1500, 0.5),
        (Encoding.SCALED_SI16, 1500, 0.25),
        (Encoding.FL32, 10, 0.2),
    ):
        data = np.frombuffer(b"".join(packets(count, encoding, every)), np.uint8)
        took = best(lambda: PulseDecoder().feed(data).to_arrow(), times)  # noqa: B023 - at once
        often = ", metadata every 10" if every == 10 else ""
        say(f"{encoding.name} to Arrow, of a memcpy{often}", copied / took, wanted)

    decoder = PulseDecoder()
    data = np.frombuffer(b"".join(packets(count, Encoding.FL32)), np.uint8)
    pulses = decoder.feed(data)
    dwells = 8
    iq = np.ascontiguousarray(pulses.iq[: dwells * PULSES * CHANNELS * GATES * 2])
    samples = iq.view(np.complex64)
    receiver = Receiver.of(decoder.state, 0.000666667)
    ranges = 150.0 * np.arange(GATES, dtype=np.float64)
    shape = (dwells, PULSES, CHANNELS, GATES)
    one_pass = best(lambda: np.abs(samples) ** 2, times * 3)
    took = best(lambda: moments_of(iq, shape, receiver, ranges, dual=True), times * 3)
    say("moments, of one abs()**2", one_pass / took, 0.3)

    def whole() -> None:
        maker = BeamMaker(DwellOptions(pulses=PULSES))
        maker.feed(data)
        maker.finish()

    say("packets to beams, of real time at 1,500/s", count / 1500 / best(whole, times), 5)
    if given.spark:
        in_spark(8 * count)
    return 0


def in_spark(count: int) -> None:
    """Make moments in Spark, on one core and on two."""
    from penstock.pipeline.run.spark import spark_session  # noqa: PLC0415 - starts Java

    with tempfile.TemporaryDirectory() as folder:
        url = f"log:{Path(folder) / 'iq'}"
        with open_writer(url) as writer:
            writer.write_many(packets(count, Encoding.SCALED_SI16, PULSES))
        took: dict[int, list[float]] = {1: [], 2: []}
        for _, cores in itertools.product(range(3), (1, 2)):
            settings = {"spark.sql.shuffle.partitions": "1", "spark.driver.host": "127.0.0.1"}
            spark = spark_session("bench", f"local[{cores}]", settings=settings)
            try:
                rows = spark.read.format("penstock").options(url=url, minPartitions=8).load()

                def work(rows: Any = rows) -> int:
                    return int(moments(rows).count())

                assert work() >= count // PULSES - 1
                took[cores].append(best(work, 5, time.perf_counter))
            finally:
                spark.stop()
        one, two = statistics.median(took[1]), statistics.median(took[2])
        print(f"  in Spark: {one:.2f} s on one core, {two:.2f} s on two")
        say("two cores, of one", one / two, 1.3)


def say(what: str, ratio: float, wanted: float) -> None:
    print(f"  {what:<45} {ratio:6.2f}x  (at least {wanted}x)")


if __name__ == "__main__":
    sys.exit(main())
