"""Workers between streams: functions and programs that take messages and give messages."""

from penstock.core.worker_function import To, worker

__all__ = ["To", "worker"]
