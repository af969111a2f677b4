"""Regular expressions of the formats of strings, for texts that are not in JSON.

Each describes a part of its format that any checker accepts: dates have a year of four digits and a day that exists.

Source: JSON Schema 2020-12, "Validation", section 7.3; RFC 3339, section 5.6 and appendix A; RFC 1123, section 2.1;
RFC 5321, section 4.1.2; RFC 4291, section 2.2; RFC 4122, section 3; RFC 3986, section 3.
"""

from __future__ import annotations

_LEAP_YEAR = "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|1[26]|[3579][26])00)"
_DATE = (
    "(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:[.][0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_CLOCK = "T(?:[0-9]+H(?:[0-9]+M)?(?:[0-9]+S)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_GROUP = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [
        f"(?:{_GROUP}:){{7}}{_GROUP}",
        *(f"(?:{_GROUP}:){{{number}}}(?::{_GROUP}){{1,{7 - number}}}" for number in range(1, 7)),
        f":(?::{_GROUP}){{1,7}}",
        f"(?:{_GROUP}:){{1,7}}:",
        "::",
    ]
)
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
# What may be in a path, without "/".
_PATH_CHARACTER = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
_PATH_END = rf"(?:/{_PATH_CHARACTER}*)*(?:[?](?:{_PATH_CHARACTER}|[/?])*)?(?:[#](?:{_PATH_CHARACTER}|[/?])*)?"

TEXT_FORMATS: dict[str, str] = {
    "date-time": f"{_DATE}T{_TIME}",
    "time": _TIME,
    "date": _DATE,
    "duration": f"P(?:[0-9]+W|{_CLOCK}|(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)(?:{_CLOCK})?)",
    "email": f"{_ATOM}(?:[.]{_ATOM})*@{_LABEL}(?:[.]{_LABEL})*",
    "hostname": f"{_LABEL}(?:[.]{_LABEL})*",
    "ipv4": f"(?:{_BYTE}[.]){{3}}{_BYTE}",
    "ipv6": _IPV6,
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": f"[a-zA-Z][a-zA-Z0-9+.-]*:(?://(?:{_LABEL}(?:[.]{_LABEL})*)(?::[0-9]{{1,5}})?|{_PATH_CHARACTER}+){_PATH_END}",
}
"""Expressions by the name of the format; those of `json_schema.FORMATS`."""

WITH_DATES: dict[str, str] = {"date": _DATE, "date-time": f"{_DATE}T.*"}
"""Regular expressions of the dates in a format that begins with one, and of anything after them."""
