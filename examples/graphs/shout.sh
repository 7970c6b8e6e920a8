#!/usr/bin/env bash
# A worker in a shell. A message comes as a frame: one digit, which says how many digits follow, the
# length of the text in hexadecimal, and the text. Results go the same way, and an empty line says
# that the message is done.
LC_ALL=C # lengths are bytes
while IFS= read -r -N 1 digits; do
  IFS= read -r -N $((16#$digits)) hex
  text=
  ((16#$hex)) && IFS= read -r -N $((16#$hex)) text
  text=${text^^}
  printf -v hex %x ${#text}
  printf '%x%s%s\n' ${#hex} "$hex" "$text"
done
