//! Names that people can give and that break what is built from them without care.

/// Display names, all valid: markup, options, globs, paths, format characters, direction overrides, the longest.
pub(crate) const ODD_NAMES: [&str; 12] = [
    "a</name><devices><disk type='file'/></devices><name>b",
    "x' model='evil",
    "&lol;",
    "]]>",
    "../../etc/x",
    "[glob*{a,b}",
    "--help",
    "a,b=c;d %s {} $(id) `id`",
    "\u{202e}gnp.exe",
    "\"quoted\\\" \u{1f600}",
    " leading and trailing ",
    "nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn",
];
