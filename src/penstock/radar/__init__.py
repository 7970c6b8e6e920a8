"""What does a weather radar send, and what is made of it? Pulses in, beams and volumes out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.radar.dwells import BeamMaker, DwellOptions
    from penstock.radar.moments_stage import moments
    from penstock.radar.stages import decode_beams, grid, open_files

__all__ = ["BeamMaker", "DwellOptions", "decode_beams", "grid", "moments", "open_files"]

#: Where each name is: loaded when it is asked for, because not all have every library.
_PLACES = {
    "BeamMaker": "penstock.radar.dwells",
    "DwellOptions": "penstock.radar.dwells",
    "decode_beams": "penstock.radar.stages",
    "grid": "penstock.radar.stages",
    "moments": "penstock.radar.moments_stage",
    "open_files": "penstock.radar.stages",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(_PLACES[name]), name)
