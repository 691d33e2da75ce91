"""Which licences are permissive enough, and how a text is told to be under one of them, or under another."""

import re

__all__ = ["lacking_licences", "other_licence", "unknown_licences"]

_REDISTRIBUTION = "redistribution and use in source and binary forms"
# each licence with words that its text has: all of one of the alternatives
_PHRASES: dict[str, tuple[tuple[str, ...], ...]] = {
    "0BSD": (("permission to use, copy, modify, and/or distribute this software",),),
    "Apache-2.0": (("apache license", "version 2.0"),),
    "BSD-2-Clause": ((_REDISTRIBUTION,),),
    "BSD-3-Clause": ((_REDISTRIBUTION, "endorse or promote products derived from this software"),),
    "BSL-1.0": (("boost software license",),),
    "CC0-1.0": (("cc0",),),
    "HPND": (("permission to use, copy, modify, and distribute this software and its documentation",),),
    "ISC": (
        ("permission to use, copy, modify, and/or distribute",),
        ("permission to use, copy, modify, and distribute",),
    ),
    "LicenseRef-Biopython": (
        ("biopython license agreement", "permission to use, copy, modify, and distribute this software"),
    ),
    "LicenseRef-Matplotlib": (("license agreement for matplotlib", "royalty-free, world-wide license"),),
    "LicenseRef-Public-Domain": (("public domain",),),
    "LicenseRef-WordNet": (("wordnet", "permission to use, copy, modify and distribute this software and database"),),
    "MIT": (("permission is hereby granted, free of charge", "without restriction"),),
    "MIT-CMU": (("permission to use, copy, modify and distribute this software and its documentation",),),
    "PostgreSQL": (("permission to use, copy, modify, and distribute this software and its documentation",),),
    "PSF-2.0": (("python software foundation license",), ("psf license agreement",)),
    "Unlicense": (("unencumbered software released into the public domain",),),
    "Zlib": (("this software is provided 'as-is', without any express or implied warranty",),),
    "ZPL-2.1": (("zope public license",),),
}
_OTHER = re.compile(
    r"\b[AL]?GPL(?:v?[123])?\b|\bGNU (?:Lesser|Library|Affero|General|Free)\b|\bMozilla Public\b|\bMPL[- ]?[12]\b"
    r"|\bEclipse Public\b|\bCommon Development and Distribution\b|\bCeCILL\b|\bShare-?Alike\b|\bCC[- ]BY\b"
    r"|\bCreative Commons\b|\bNon-?Commercial (?:use|licen[cs]e)\b|\bEuropean Union Public\b"
    r"|\bproprietary and confidential\b|\bBusiness Source Licen[cs]e\b|\bElastic Licen[cs]e\b|\bServer Side Public\b",
    re.IGNORECASE,
)
_RESERVED = re.compile(r"\ball rights reserved\b", re.IGNORECASE)
_PERMISSIVE_NOTICE = re.compile(
    r"redistribution and use in source and binary forms|permission is hereby granted|apache license"
    r"|licensed under the apache|\bBSD[- ](?:style|\d|licen[cs]e)|\bMIT[- ]licen[cs]e|zope public license|under the PSF"
    r"|licen[cs]ed? (?:under|:) (?:the )?(?:terms of the )?(?:modified |new |simplified )?(?:BSD|MIT|Apache)"
    r"|SPDX-License-Identifier:\s*(?:MIT|BSD|Apache|ISC|PSF|Zlib|ZPL|0BSD|HPND)",
    re.IGNORECASE,
)


def unknown_licences(expression: str) -> list[str]:
    """Tell which parts of an SPDX expression are not on the list.

    Args:
        expression: identifiers joined by AND and OR; of an OR every side must be on the list.

    Returns:
        The identifiers that are not; the whole expression if it is empty.
    """
    names = re.split(r"\s+(?:AND|OR)\s+", expression.strip())
    return [name or "no licence" for name in names if name not in _PHRASES]


def lacking_licences(expression: str, text: str) -> list[str]:
    """Tell which parts of an SPDX expression a licence's text does not bear out.

    Args:
        expression: one that `unknown_licences` has nothing against.
        text: the licence files of the archive, one behind the other.

    Returns:
        The identifiers whose words the text lacks.
    """
    plain = (
        " ".join(re.sub(r"[#*>]|//", " ", text).lower().split()).replace('"', "'").replace("`", "'").replace("''", "'")
    )
    names = re.split(r"\s+(?:AND|OR)\s+", expression.strip())
    return [name for name in names if not any(all(word in plain for word in words) for words in _PHRASES[name])]


def other_licence(text: str) -> bool:
    """Tell whether a file speaks of another licence than the permissive ones, or keeps all rights without granting any.

    Args:
        text: of one file.

    Returns:
        True if the file had better be left out. A file that merely mentions such a licence is left out as well.
    """
    if _OTHER.search(text):
        return True
    return _RESERVED.search(text) is not None and _PERMISSIVE_NOTICE.search(text) is None
