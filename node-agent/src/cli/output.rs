//! What people and scripts read.

use std::io::{self, IsTerminal, Write};

use crate::logging::for_terminal;

/// Standard output. A reader that went away is no failure.
#[derive(Debug)]
pub(crate) struct Out {
    out: io::Stdout,
}

impl Out {
    pub(crate) fn new() -> Self {
        Self { out: io::stdout() }
    }

    pub(crate) fn is_terminal(&self) -> bool {
        self.out.is_terminal()
    }

    /// Writes bytes as they are, at once.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self.out.write_all(bytes).and_then(|()| self.out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            other => other,
        }
    }

    /// Writes a line, escaped.
    pub(crate) fn line(&mut self, text: &str) -> io::Result<()> {
        self.bytes(format!("{}\n", for_terminal(text)).as_bytes())
    }
}

/// A line on standard error, with the program's name.
pub(crate) fn complain(text: &str) {
    let mut err = io::stderr().lock();
    for line in text.lines() {
        // Nobody is left to be told.
        drop(writeln!(err, "bcd-node: {}", for_terminal(line)));
    }
}

/// A line of progress on standard error.
pub(crate) fn note(text: &str) {
    // Nobody is left to be told.
    drop(writeln!(io::stderr().lock(), "{}", for_terminal(text)));
}

/// Aligned columns. An empty table is a head alone.
pub(crate) fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let rows: Vec<Vec<String>> =
        std::iter::once(head.iter().map(|cell| (*cell).to_owned()).collect())
            .chain(rows.iter().map(|row| row.iter().map(|cell| for_terminal(cell)).collect()))
            .collect();
    let widths: Vec<usize> = (0..head.len())
        .map(|column| {
            rows.iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or_default()
        })
        .collect();
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_and_no_cell_can_break_a_line_or_colour_it() {
        let rows = [
            vec!["a".to_owned(), "b\n\u{1b}[31m".to_owned()],
            vec!["longer".to_owned(), String::new()],
        ];
        let text = table(&["ONE", "TWO"], &rows);
        assert_eq!(text, "ONE     TWO\na       b\\n\\u{1b}[31m\nlonger\n");
    }
}
