"""What is an IWRF packet?

NCAR's radars and LROSE send time series as packets that begin with the same 56 bytes and then are
one C struct each, in the byte order of their host, without padding. This is the table of them: a
name, the number in the packet's id, and the fields behind the common ones. Every layout, default
and word elsewhere comes from here (docs/specs/iwrf.md 1).
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from penstock.core.errors import InvalidOption, Malformed

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "BY_ELEVATION",
    "ENDS",
    "ID_BASE",
    "INFO_KINDS",
    "LARGEST",
    "LAST_KIND",
    "MISSING",
    "PACKET_SIZE",
    "STARTS",
    "STRUCTS",
    "SYNC_WORDS",
    "VALUE_BYTES",
    "Encoding",
    "Event",
    "Kind",
    "Record",
    "Struct",
    "dtype_of",
    "is_missing",
    "make",
    "name_of",
    "read",
    "text_of",
    "time_ns_of",
]

#: One packet without what follows it, or many: an array of one of the dtypes here.
Record: TypeAlias = "np.ndarray[Any, np.dtype[np.void]]"

#: An id is this and the number of the kind; ids up to the last are those of some packet.
ID_BASE: Final = 0x77770000
LAST_KIND: Final = 0x3E8
#: The same 16 bits are on both sides of a swapped id, so that they tell the byte order.
ID_MARK: Final = 0x7777
#: Bytes of a packet at most, as LROSE has it.
LARGEST: Final = 10_000_000
#: What stands for a number that nobody knows.
MISSING: Final = -9999
#: The two words of a sync packet, the same in either byte order.
SYNC_WORDS: Final = (0x2A2A2A2A, 0x7E7E7E7E)


class Kind(IntEnum):
    """The kinds of packets: what is added to `ID_BASE` in the id."""

    SYNC = 0x01
    RADAR_INFO = 0x02
    SCAN_SEGMENT = 0x03
    ANTENNA_CORRECTION = 0x04
    TS_PROCESSING = 0x05
    XMIT_POWER = 0x06
    XMIT_SAMPLE = 0x07
    CALIBRATION = 0x08
    EVENT_NOTICE = 0x09
    PHASECODE = 0x0A
    XMIT_INFO = 0x0B
    PULSE = 0x0C
    VERSION = 0x0D
    UI_OPERATIONS = 0x0E
    ANT_CONTROL_CONSTANTS = 0x0F
    XMIT_SAMPLE_V2 = 0x10
    BURST = 0x11
    STATUS_XML = 0x12
    ANTENNA_ANGLES = 0x13
    RX_POWER = 0x14
    RVP8_OPS_INFO = 0x70
    RVP8_PULSE = 0x71
    MOMENTS_FIELD = 0x101
    MOMENTS_RAY = 0x102
    MOMENTS_FIELD_INDEX = 0x103
    PLATFORM_GEOREF = 0x111
    GEOREF_CORRECTION = 0x112


class Encoding(IntEnum):
    """How the values of a pulse are written."""

    FL32 = 1
    SCALED_SI16 = 2
    DBM_PHASE_SI16 = 3
    SIGMET_FL16 = 4
    SCALED_SI32 = 5


#: Bytes of a value, by its encoding.
VALUE_BYTES: Final = {
    Encoding.FL32: 4,
    Encoding.SCALED_SI16: 2,
    Encoding.DBM_PHASE_SI16: 2,
    Encoding.SIGMET_FL16: 2,
    Encoding.SCALED_SI32: 4,
}


class Event(IntFlag):
    """What a pulse's `event_flags` say."""

    END_OF_SWEEP = 1
    END_OF_VOLUME = 2
    START_OF_SWEEP = 4
    START_OF_VOLUME = 8
    START_OF_BLOCK = 16
    END_OF_BLOCK = 32


#: Events that begin or end a sweep or a volume.
STARTS: Final = int(Event.START_OF_SWEEP | Event.START_OF_VOLUME)
ENDS: Final = int(Event.END_OF_SWEEP | Event.END_OF_VOLUME)
#: Values of `scan_mode` whose sweeps move in elevation: RHI, elevation surveillance, and both by
#: hand or at the sun.
BY_ELEVATION: Final = (3, 9, 14, 16, 17)


class Struct(NamedTuple):
    """One row of the table."""

    #: As it is called in C.
    name: str
    #: None: a part of others.
    kind: Kind | None
    #: `name type` or `name type*count`, in numpy's short names of types.
    fields: str
    #: Whether the 56 bytes that packets share come first.
    is_packet: bool = True
    #: Whether more may follow it in the packet.
    has_data: bool = False
    #: Whether numbers are `MISSING` unless they are given.
    is_metadata: bool = False
    #: What numbers are instead.
    defaults: Mapping[str, float] = {}


_COMMON: Final = """
    id i4, len_bytes i4, seq_num i8, version_num i4, radar_id i4, time_secs_utc i8,
    time_nano_secs i4, reserved i4*5"""

_K = Kind

STRUCTS: Final = (
    Struct("iwrf_packet_info_t", None, _COMMON, is_packet=False),
    Struct("iwrf_sync_t", _K.SYNC, "magik i4*2"),
    Struct(
        "iwrf_version_t",
        _K.VERSION,
        "major_version_num i4, minor_version_num i4, version_name S64",
    ),
    Struct(
        "iwrf_radar_info_t",
        _K.RADAR_INFO,
        """
        latitude_deg f4, longitude_deg f4, altitude_m f4, platform_type i4, beamwidth_deg_h f4,
        beamwidth_deg_v f4, wavelength_cm f4, nominal_gain_ant_db_h f4, nominal_gain_ant_db_v f4,
        unused f4*25, radar_name S32, site_name S32""",
        is_metadata=True,
        defaults={"platform_type": 1},
    ),
    Struct(
        "iwrf_scan_segment_t",
        _K.SCAN_SEGMENT,
        """
        scan_mode i4, follow_mode i4, volume_num i4, sweep_num i4, time_limit i4, az_manual f4,
        el_manual f4, az_start f4, el_start f4, scan_rate f4, left_limit f4, right_limit f4,
        up_limit f4, down_limit f4, step f4, current_fixed_angle f4, init_direction_cw i4,
        init_direction_up i4, n_sweeps i4, fixed_angles f4*512, optimizer_rmax_km f4,
        optimizer_htmax_km f4, optimizer_res_m f4, sun_scan_sector_width_az f4,
        sun_scan_sector_width_el f4, timeseries_archive_enable i4, waveguide_switch_position i4,
        start_ppi_ccw i4, unused f4*455, segment_name S32, project_name S32""",
        is_metadata=True,
        defaults={
            **dict.fromkeys(("scan_mode", "follow_mode", "time_limit", "n_sweeps"), 0),
            **dict.fromkeys(("init_direction_cw", "init_direction_up"), 1),
            **dict.fromkeys(("timeseries_archive_enable", "waveguide_switch_position"), 0),
            "start_ppi_ccw": 0,
        },
    ),
    Struct(
        "iwrf_antenna_correction_t",
        _K.ANTENNA_CORRECTION,
        "az_correction f4, el_correction f4, unused f4*16",
        is_metadata=True,
    ),
    Struct(
        "iwrf_ts_processing_t",
        _K.TS_PROCESSING,
        """
        xmit_rcv_mode i4, xmit_phase_mode i4, prf_mode i4, pulse_type i4, prt_usec f4, prt2_usec f4,
        cal_type i4, burst_range_offset_m f4, pulse_width_us f4, start_range_m f4,
        gate_spacing_m f4, integration_cycle_pulses i4, clutter_filter_number i4,
        range_gate_averaging i4, max_gate i4, test_power_dbm f4, test_pulse_range_km f4,
        test_pulse_length_usec f4, pol_mode i4, xmit_flag i4*2, beams_are_indexed i4,
        specify_dwell_width i4, indexed_beam_width_deg f4, indexed_beam_spacing_deg f4, num_prts i4,
        prt3_usec f4, prt4_usec f4, block_mode_prt2_pulses i4, block_mode_prt3_pulses i4,
        block_mode_prt4_pulses i4, pol_sync_mode u4, unused f4*18""",
        is_metadata=True,
        defaults={
            **dict.fromkeys(("xmit_rcv_mode", "xmit_phase_mode", "prf_mode", "pulse_type"), 0),
            **dict.fromkeys(("cal_type", "pol_mode", "xmit_flag", "beams_are_indexed"), 0),
            **dict.fromkeys(("range_gate_averaging", "specify_dwell_width", "num_prts"), 1),
            **dict.fromkeys(("indexed_beam_width_deg", "indexed_beam_spacing_deg"), 1.0),
            "pol_sync_mode": 0,
        },
    ),
    Struct(
        "iwrf_xmit_power_t",
        _K.XMIT_POWER,
        "power_dbm_h f4, power_dbm_v f4, unused i4*16",
        is_metadata=True,
    ),
    Struct(
        "iwrf_rx_power_t",
        _K.RX_POWER,
        """
        max_power_dbm_hc f4, max_power_dbm_vc f4, max_power_dbm_hx f4, max_power_dbm_vx f4,
        unused i4*14""",
        is_metadata=True,
    ),
    Struct(
        "iwrf_xmit_sample_t",
        _K.XMIT_SAMPLE,
        """
        power_dbm_h f4, power_dbm_v f4, offset i4, n_samples i4, sampling_freq f4, scale_h f4,
        offset_h f4, scale_v f4, offset_v f4, samples_h i4*512, samples_v i4*512, unused i4*1001""",
    ),
    Struct(
        "iwrf_xmit_sample_v2_t",
        _K.XMIT_SAMPLE_V2,
        "n_samples i4, n_channels i4, unused i4*6",
        has_data=True,
    ),
    Struct(
        "iwrf_burst_header_t",
        _K.BURST,
        """
        pulse_seq_num i8, n_samples i4, channel_id i4, iq_encoding i4, scale f4, offset f4,
        power_dbm f4, phase_deg f4, freq_hz f4, sampling_freq_hz f4, power_max_dbm f4,
        power_p90_dbm f4, pulse_width_sec f4, unused i4*4""",
        has_data=True,
        defaults={"iq_encoding": 1, "scale": 1},
    ),
    Struct("iwrf_status_xml_t", _K.STATUS_XML, "xml_len i4, unused i4*17", has_data=True),
    Struct(
        "iwrf_antenna_angles_t",
        _K.ANTENNA_ANGLES,
        """
        scan_mode i4, follow_mode i4, volume_num i4, sweep_num i4, fixed_el f4, fixed_az f4,
        elevation f4, azimuth f4, antenna_transition i4, status i4, event_flags i4, unused i4*7""",
    ),
    Struct(
        "iwrf_calibration_t",
        _K.CALIBRATION,
        """
        wavelength_cm f4, beamwidth_deg_h f4, beamwidth_deg_v f4, gain_ant_db_h f4,
        gain_ant_db_v f4, pulse_width_us f4, xmit_power_dbm_h f4, xmit_power_dbm_v f4,
        two_way_waveguide_loss_db_h f4, two_way_waveguide_loss_db_v f4,
        two_way_radome_loss_db_h f4, two_way_radome_loss_db_v f4, receiver_mismatch_loss_db f4,
        radar_constant_h f4, radar_constant_v f4, noise_dbm_hc f4, noise_dbm_hx f4, noise_dbm_vc f4,
        noise_dbm_vx f4, receiver_gain_db_hc f4, receiver_gain_db_hx f4, receiver_gain_db_vc f4,
        receiver_gain_db_vx f4, base_dbz_1km_hc f4, base_dbz_1km_hx f4, base_dbz_1km_vc f4,
        base_dbz_1km_vx f4, sun_power_dbm_hc f4, sun_power_dbm_hx f4, sun_power_dbm_vc f4,
        sun_power_dbm_vx f4, noise_source_power_dbm_h f4, noise_source_power_dbm_v f4,
        power_meas_loss_db_h f4, power_meas_loss_db_v f4, coupler_forward_loss_db_h f4,
        coupler_forward_loss_db_v f4, test_power_dbm_h f4, test_power_dbm_v f4,
        zdr_correction_db f4, ldr_correction_db_h f4, ldr_correction_db_v f4, phidp_rot_deg f4,
        receiver_slope_hc f4, receiver_slope_hx f4, receiver_slope_vc f4, receiver_slope_vx f4,
        i0_dbm_hc f4, i0_dbm_hx f4, i0_dbm_vc f4, i0_dbm_vx f4, dynamic_range_db_hc f4,
        dynamic_range_db_hx f4, dynamic_range_db_vc f4, dynamic_range_db_vx f4, k_squared_water f4,
        dbz_correction f4, unused i4*49, radar_name S32""",
        is_metadata=True,
        defaults={
            **dict.fromkeys(("zdr_correction_db", "ldr_correction_db_h", "ldr_correction_db_v"), 0),
            **dict.fromkeys(("phidp_rot_deg", "dbz_correction"), 0),
        },
    ),
    Struct(
        "iwrf_event_notice_t",
        _K.EVENT_NOTICE,
        """
        start_of_sweep i4, end_of_sweep i4, start_of_volume i4, end_of_volume i4, scan_mode i4,
        follow_mode i4, volume_num i4, sweep_num i4, cause i4, current_fixed_angle f4,
        antenna_transition i4, unused i4*7""",
        defaults={"volume_num": MISSING, "sweep_num": MISSING, "current_fixed_angle": MISSING},
    ),
    Struct("iwrf_phase_sample_t", None, "phase_deg_h f4, phase_deg_v f4", is_packet=False),
    Struct(
        "iwrf_phasecode_t",
        _K.PHASECODE,
        "seq_length i4, spare i4, phase iwrf_phase_sample_t*256, unused f4*496",
    ),
    Struct(
        "iwrf_xmit_info_t",
        _K.XMIT_INFO,
        """
        xmit_0_enabled i4, xmit_1_enabled i4, xmit_rcv_mode i4, pol_mode i4, xmit_phase_mode i4,
        prf_mode i4, pulse_type i4, prt_usec f4, prt2_usec f4, unused f4*9""",
        defaults={"prt_usec": MISSING, "prt2_usec": MISSING},
    ),
    Struct(
        "iwrf_pulse_header_t",
        _K.PULSE,
        """
        pulse_seq_num i8, scan_mode i4, follow_mode i4, volume_num i4, sweep_num i4, fixed_el f4,
        fixed_az f4, elevation f4, azimuth f4, prt f4, prt_next f4, pulse_width_us f4, n_gates i4,
        n_channels i4, iq_encoding i4, hv_flag i4, antenna_transition i4, phase_cohered i4,
        status i4, n_data i4, iq_offset i4*4, burst_mag f4*4, burst_arg f4*4, burst_arg_diff f4*4,
        scale f4, offset f4, n_gates_burst i4, start_range_m f4, gate_spacing_m f4, event_flags i4,
        txrx_state i4, tx_phase_deg f4, block_id i4, unused i4*4""",
        has_data=True,
        defaults={
            **dict.fromkeys(("volume_num", "sweep_num"), -1),
            **dict.fromkeys(("n_channels", "iq_encoding", "hv_flag", "scale"), 1),
        },
    ),
    Struct(
        "iwrf_rvp8_ops_info_t",
        _K.RVP8_OPS_INFO,
        """
        i_version i4, i_major_mode u4, i_polarization u4, i_phase_mode_seq u4, i_task_sweep u2,
        i_task_aux_num u2, i_task_scan_type i4, unused1 i4*3, s_task_name S32, s_site_name S32,
        i_aq_mode u4, i_unfold_mode u4, i_pwidth_code u4, f_pwidth_usec f4, f_dbz_calib f4,
        i_sample_size i4, i_mean_angle_sync u4, i_flags u4, i_playback_version i4, f_sy_clk_mhz f4,
        f_wavelength_cm f4, f_saturation_dbm f4, f_range_mask_res f4, i_range_mask u2*512,
        f_noise_dbm f4*4, f_noise_stdv_db f4*4, f_noise_range_km f4, f_noise_prf_hz f4,
        i_gparm_latch_sts u2*2, i_gparm_immed_sts u2*6, i_gparm_diag_bits u2*4,
        s_version_string S12, unused2 i4*185""",
    ),
    Struct(
        "iwrf_rvp8_pulse_header_t",
        _K.RVP8_PULSE,
        """
        i_version i4, i_flags u1, i_aq_mode u1, i_polar_bits u1, i_viq_per_bin u1, i_tg_bank u1,
        unused1 u1*3, i_tx_phase u2, i_az u2, i_el u2, i_num_vecs i2, i_max_vecs i2, i_tg_wave u2,
        i_btime_api u4, i_sys_time u4, i_prev_prt u4, i_next_prt u4, i_seq_num u4, uiq_perm u4*2,
        uiq_once u4*2, i_data_off i4*4, f_burst_mag f4*4, i_burst_arg u2*4, i_wrap_iq u2*4,
        unused2 i4*23""",
    ),
    Struct(
        "iwrf_moments_field_header_t",
        _K.MOMENTS_FIELD,
        """
        name S32, long_name S128, standard_name S128, units S16, threshold_field_name S32,
        encoding i4, byte_width i4, scale f4, offset f4, sampling_ratio f4, threshold_value f4,
        n_samples i4, nyquist_mps f4, unused i4*22""",
        has_data=True,
    ),
    Struct(
        "iwrf_moments_ray_header_t",
        _K.MOMENTS_RAY,
        """
        volume_num i4, sweep_num i4, scan_mode i4, follow_mode i4, prf_mode i4,
        polarization_mode i4, elevation f4, azimuth f4, fixed_angle f4, target_scan_rate f4,
        true_scan_rate f4, is_indexed i4, angle_res f4, antenna_transition i4, prt f4, prt_ratio f4,
        pulse_width_us f4, n_samples i4, n_fields i4, n_gates i4, start_range_m f4,
        gate_spacing_m f4, nyquist_mps f4, unambig_range_km f4, meas_xmit_power_dbm_h f4,
        meas_xmit_power_dbm_v f4, event_flags i4, unused i4*23""",
        has_data=True,
    ),
    Struct(
        "iwrf_moments_field_index_t",
        _K.MOMENTS_FIELD_INDEX,
        "field_name S32, id i4, offset i4, len i4, spare i4*5",
        is_packet=False,
    ),
    Struct(
        "iwrf_platform_georef_t",
        _K.PLATFORM_GEOREF,
        """
        unit_num i4, unit_id i4, altitude_msl_km f4, altitude_agl_km f4, ew_velocity_mps f4,
        ns_velocity_mps f4, vert_velocity_mps f4, heading_deg f4, roll_deg f4, pitch_deg f4,
        drift_angle_deg f4, rotation_angle_deg f4, tilt_deg f4, ew_horiz_wind_mps f4,
        ns_horiz_wind_mps f4, vert_wind_mps f4, heading_rate_dps f4, pitch_rate_dps f4,
        drive_angle_1_deg f4, drive_angle_2_deg f4, longitude f8, latitude f8, track_deg f4,
        roll_rate_dps f4, unused f4*24""",
        is_metadata=True,
        defaults={"unit_num": 0, "unit_id": 0},
    ),
    Struct(
        "iwrf_georef_correction_t",
        _K.GEOREF_CORRECTION,
        """
        azimuth_corr_deg f4, elevation_corr_deg f4, range_delay_corr_mps f4, longitude_corr_deg f4,
        latitude_corr_deg f4, pressure_alt_corr_km f4, radar_alt_corr_km f4, ew_gndspd_corr_mps f4,
        ns_gndspd_corr_mps f4, vert_vel_corr_mps f4, heading_corr_deg f4, roll_corr_deg f4,
        pitch_corr_deg f4, drift_corr_deg f4, rot_angle_corr_deg f4, tilt_corr_deg f4,
        unused f4*34""",
    ),
)

_BY_NAME: Final = {struct.name: struct for struct in STRUCTS}
#: The packets whose layout is known, and the bytes of each without what follows it.
_BY_KIND: Final = {s.kind: s for s in STRUCTS if s.kind is not None and s.is_packet}


@lru_cache(maxsize=len(STRUCTS) * 2)
def dtype_of(name: str, order: str = "<") -> np.dtype[np.void]:
    """Return the layout of a struct, by its name in C; `order` as in numpy: `<` or `>`."""
    struct = _BY_NAME[name]
    text = f"{_COMMON}, {struct.fields}" if struct.is_packet else struct.fields
    fields: list[Any] = []
    for each in text.split(","):
        field, kind = each.split()
        kind, _, count = kind.partition("*")
        one = dtype_of(kind, order) if kind in _BY_NAME else np.dtype(f"{order}{kind}")
        fields.append((field, one, (int(count),)) if count else (field, one))
    return np.dtype(fields)


#: Bytes of a packet by its kind, or of its struct where more may follow.
PACKET_SIZE: Final = {kind: dtype_of(struct.name).itemsize for kind, struct in _BY_KIND.items()}
#: Kinds that more bytes may follow than their struct has.
WITH_DATA: Final = frozenset(kind for kind, struct in _BY_KIND.items() if struct.has_data)
#: What a reader keeps: the state of the radar. Notices are told once.
INFO_KINDS: Final = frozenset(
    {kind for kind in Kind if kind <= Kind.XMIT_INFO}
    | {Kind.STATUS_XML, Kind.RX_POWER, Kind.RVP8_OPS_INFO, Kind.PLATFORM_GEOREF}
)


def is_known_id(id: int) -> bool:
    """Tell whether a number is the id of some packet, in this byte order."""
    return ID_BASE < id <= ID_BASE + LAST_KIND


def layout_of(kind: int, order: str = "<") -> np.dtype[np.void]:
    """Return the layout of a packet by its kind; of an unknown kind, the common part."""
    struct = _BY_KIND.get(kind)  # type: ignore[call-overload]
    return dtype_of("iwrf_packet_info_t" if struct is None else struct.name, order)


def name_of(kind: int) -> str:
    """Return what a kind is called."""
    try:
        return Kind(kind).name.lower()
    except ValueError:
        return f"packet {kind:#x}"


# --- one packet -----------------------------------------------------------------------------------


def make(
    kind: Kind, *, time_ns: int = 0, seq_num: int = 0, data: bytes = b"", **fields: Any
) -> bytes:
    """Return a packet; fields that are not given have LROSE's defaults.

    :raises InvalidOption: the packet has no such field, or its value does not fit.
    """
    struct = _BY_KIND[kind]
    if data and not struct.has_data:
        raise InvalidOption("data", f"{len(data)} bytes", f"nothing follows a {kind.name}")
    packet: Record = np.zeros(1, dtype_of(struct.name))
    common = dtype_of("iwrf_packet_info_t").names or ()
    for name in packet.dtype.names or ():
        is_number = packet.dtype[name].base.kind in "if"
        if struct.is_metadata and is_number and name not in common and name != "unused":
            packet[name] = MISSING
    seconds, nanos = divmod(time_ns, 1_000_000_000)
    given = {
        "id": ID_BASE + kind,
        "len_bytes": packet.dtype.itemsize + len(data),
        "seq_num": seq_num,
        "version_num": 1,
        "time_secs_utc": seconds,
        "time_nano_secs": nanos,
        **struct.defaults,
        **({"magik": SYNC_WORDS} if kind == Kind.SYNC else {}),
        **fields,
    }
    for name, value in given.items():
        if name not in (packet.dtype.names or ()):
            raise InvalidOption(name, value, f"a {name_of(kind)} packet has no such field")
        try:
            packet[name][0] = value.encode() if isinstance(value, str) else value
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidOption(name, value, str(error)) from None
    return packet.tobytes() + data


def read(packet: bytes | memoryview, kind: Kind | None = None) -> Record:
    """Return the struct at the start of a packet: one record, in the byte order of this machine.

    :raises Malformed: this is no packet, it is too short, or of another kind.
    """
    small = dtype_of("iwrf_packet_info_t").itemsize
    if len(packet) < small:
        raise Malformed("an IWRF packet", "length", f"at least {small} bytes", len(packet))
    id = int.from_bytes(packet[:4], "little")
    order = "<"
    if id & 0xFFFF == ID_MARK:
        id = int.from_bytes(packet[:4], "big")
        order = ">"
    if not is_known_id(id):
        raise Malformed("an IWRF packet", "id", f"above {ID_BASE:#x}", f"{id:#x}")
    found = id - ID_BASE
    if kind is not None and found != kind:
        raise Malformed("an IWRF packet", "id", name_of(kind), name_of(found))
    layout = layout_of(found, order)
    if len(packet) < layout.itemsize:
        raise Malformed(
            f"a {name_of(found)} packet", "length", f"at least {layout.itemsize}", len(packet)
        )
    record: Record = np.frombuffer(packet, layout, 1)
    return record.astype(layout_of(found)) if order == ">" else record


def text_of(value: bytes) -> str:
    """Return a text field of a packet, up to its NUL."""
    return bytes(value).partition(b"\0")[0].decode(errors="replace")


def is_missing(value: float) -> bool:
    """Tell whether a number of the metadata stands for a missing value."""
    return value != value or abs(value - MISSING) < 0.001  # noqa: PLR0124, PLR2004 - NaN


def time_ns_of(records: Record) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the times of packets, in nanoseconds since 1970.

    A packet may say 1,000,000,000 nanoseconds: that is the next second.
    """
    times: np.ndarray[Any, np.dtype[np.int64]] = records["time_secs_utc"] * 1_000_000_000
    times += records["time_nano_secs"]
    return times
