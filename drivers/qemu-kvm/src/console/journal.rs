//! The memory into which QEMU writes what the guest says, so that nothing is lost while no agent is there.
//!
//! A memory file of fixed size (sealed: it cannot grow) is QEMU's log file for the serial port. Both sides share one open
//! file, and with it one write position: QEMU moves it by writing, the agent reads up to it and moves it back. When nobody
//! reads for long, the file fills up, QEMU's writes fail with `EPERM` and are dropped: the guest is never blocked and the
//! host's memory and disk never filled. The agent copies what it reads to the log on disk.
//!
//! The first page belongs to the agent: it holds the position up to which the log on disk has everything.

use std::{
    fs::File,
    io::{self, Seek, SeekFrom},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::FileExt,
    },
};

use crate::ofd;
use host::process::PidFd;
use rustix::{
    fs::{MemfdFlags, OFlags, SealFlags, fcntl_add_seals, fcntl_getfl, fcntl_setfl, memfd_create},
    process::{PidfdGetfdFlags, pidfd_getfd},
};

/// Where QEMU's part begins: one page.
const HEADER: u64 = 4096;
/// How much is kept while no agent reads: a boot of Linux writes about 64 KiB.
pub(crate) const CAPACITY: u64 = 1 << 20;
/// A write that comes as near to the end as this may have been refused: QEMU's serial port writes 16 bytes at most.
const MARGIN: u64 = 64;

/// The agent's side of the journal.
#[derive(Debug)]
pub(crate) struct Journal {
    /// Shares its position with QEMU.
    shared: File,
    /// For reading at any place.
    memory: File,
    /// Up to where everything was read.
    read_at: u64,
    capacity: u64,
    /// Whether this is the one agent that reads: it holds the lock of the memory file.
    reads: bool,
}

/// What was read.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Drained {
    pub(crate) bytes: Vec<u8>,
    /// The memory was full: some output may be missing after these bytes.
    pub(crate) lost: bool,
}

impl Journal {
    /// A new journal, and the descriptor for QEMU.
    pub(crate) fn create(capacity: u64) -> io::Result<(Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = File::from(memfd_create("bcd-serial", flags)?);
        memory.set_len(HEADER + capacity)?;
        fcntl_add_seals(&memory, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
        let shared =
            File::options().write(true).open(format!("/proc/self/fd/{}", memory.as_raw_fd()))?;
        (&shared).seek(SeekFrom::Start(HEADER))?;
        let for_qemu = OwnedFd::from(shared.try_clone()?);
        let mut journal = Self { shared, memory, read_at: HEADER, capacity, reads: false };
        journal.commit()?;
        journal.reads = ofd::try_hold(&journal.memory)?;
        Ok((journal, for_qemu))
    }

    /// The journal of a VMM that another agent started, from its descriptor number there.
    pub(crate) fn adopt(pidfd: &PidFd, number: i32) -> io::Result<Self> {
        let shared = File::from(pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty())?);
        let memory = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/self/fd/{}", shared.as_raw_fd()))?;
        let length = memory.metadata()?.len();
        let capacity =
            length.checked_sub(HEADER).filter(|capacity| *capacity > MARGIN).ok_or_else(|| {
                io::Error::new(io::ErrorKind::InvalidData, "the descriptor is no serial journal")
            })?;
        let mut journal = Self { shared, memory, read_at: HEADER, capacity, reads: false };
        journal.stop_appending()?;
        journal.take_over()?;
        Ok(journal)
    }

    /// Becomes the reader, where no other agent is: from where the last one was.
    fn take_over(&mut self) -> io::Result<bool> {
        if self.reads {
            return Ok(true);
        }
        self.reads = ofd::try_hold(&self.memory)?;
        if self.reads {
            let mut word = [0; 8];
            self.memory.read_exact_at(&mut word, 0)?;
            let (read_at, end) = (u64::from_le_bytes(word), self.position()?);
            // Beyond the end: the last reader was killed between moving the position back and writing the header.
            self.read_at = if (HEADER..=end).contains(&read_at) { read_at } else { end };
        }
        Ok(self.reads)
    }

    /// Has QEMU write at the shared position. It opens its log for appending, which would be the end of the file; done
    /// before the guest runs.
    pub(crate) fn stop_appending(&self) -> io::Result<()> {
        let flags = fcntl_getfl(&self.shared)?;
        Ok(fcntl_setfl(&self.shared, flags.difference(OFlags::APPEND))?)
    }

    fn position(&self) -> io::Result<u64> {
        (&self.shared).stream_position()
    }

    /// Takes what QEMU has written since the last time.
    pub(crate) fn drain(&mut self) -> io::Result<Drained> {
        if !self.take_over()? {
            return Ok(Drained::default());
        }
        let end = self.position()?.min(HEADER + self.capacity);
        let mut drained = Drained::default();
        self.take(end, &mut drained.bytes)?;
        drained.lost = end + MARGIN > HEADER + self.capacity;
        if end > HEADER + self.capacity / 2 {
            self.rewind(end, &mut drained.bytes)?;
        }
        Ok(drained)
    }

    fn take(&mut self, end: u64, into: &mut Vec<u8>) -> io::Result<()> {
        let count = end.saturating_sub(self.read_at);
        let begin = into.len();
        into.resize(begin + usize::try_from(count).unwrap_or(0), 0);
        if let Some(fresh) = into.get_mut(begin..) {
            self.memory.read_exact_at(fresh, self.read_at)?;
        }
        self.read_at = end;
        Ok(())
    }

    /// Moves the shared position back by as much as was read. The move is relative, and the kernel does it between two
    /// writes of QEMU, so where it lands says how much QEMU wrote meanwhile: that part is still at the old place.
    fn rewind(&mut self, end: u64, into: &mut Vec<u8>) -> io::Result<()> {
        let back = i64::try_from(end - HEADER).map_err(io::Error::other)?;
        let landed = (&self.shared).seek(SeekFrom::Current(-back))?;
        let meanwhile = landed.saturating_sub(HEADER);
        self.take(end + meanwhile, into)?;
        self.read_at = landed;
        Ok(())
    }

    /// Writes down that what was drained is kept elsewhere now.
    pub(crate) fn commit(&mut self) -> io::Result<()> {
        self.memory.write_all_at(&self.read_at.to_le_bytes(), 0)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn pair(capacity: u64) -> (Journal, File) {
        let (journal, fd) = Journal::create(capacity).unwrap();
        (journal, File::from(fd))
    }

    #[test]
    fn what_is_written_is_read_once_and_in_order_over_many_turns() {
        let (mut journal, mut qemu) = pair(1000);
        let mut all = Vec::new();
        let mut expected = Vec::new();
        for turn in 0..500_u32 {
            let text = format!("line {turn}\n");
            qemu.write_all(text.as_bytes()).unwrap();
            expected.extend_from_slice(text.as_bytes());
            if turn % 7 == 0 {
                let drained = journal.drain().unwrap();
                assert!(!drained.lost);
                all.extend(drained.bytes);
                journal.commit().unwrap();
            }
        }
        all.extend(journal.drain().unwrap().bytes);
        assert_eq!(all, expected);
    }

    #[test]
    fn a_writer_beside_the_reader_loses_nothing() {
        let (mut journal, mut qemu) = pair(1 << 16);
        let writer = std::thread::spawn(move || {
            for number in 0..200_000_u32 {
                // As QEMU: what does not fit is dropped; the reader is fast enough that nothing is.
                while qemu.write_all(&number.to_le_bytes()).is_err() {
                    std::thread::yield_now();
                }
            }
        });
        let mut all = Vec::new();
        while !writer.is_finished() {
            all.extend(journal.drain().unwrap().bytes);
        }
        writer.join().unwrap();
        all.extend(journal.drain().unwrap().bytes);
        let numbers: Vec<u32> =
            all.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
        assert_eq!(numbers.len(), 200_000);
        assert!(numbers.iter().zip(0..).all(|(found, wanted)| *found == wanted));
    }

    #[test]
    fn a_full_journal_refuses_writes_and_says_that_output_is_lost() {
        let (mut journal, mut qemu) = pair(1000);
        while qemu.write(b"0123456789").is_ok() {}
        let drained = journal.drain().unwrap();
        assert!(drained.lost);
        assert_eq!(drained.bytes.len(), 1000);
        qemu.write_all(b"again").unwrap();
        assert_eq!(journal.drain().unwrap(), Drained { bytes: b"again".to_vec(), lost: false });
    }

    #[test]
    fn another_agent_goes_on_where_the_first_one_committed() {
        let (mut journal, mut qemu) = pair(10_000);
        qemu.write_all(b"one").unwrap();
        assert_eq!(journal.drain().unwrap().bytes, b"one");
        journal.commit().unwrap();
        drop(journal);
        qemu.write_all(b"two").unwrap();
        // This process plays the VMM.
        let me = host::process::Identity::of(std::process::id()).unwrap();
        let pidfd = me.open().unwrap().unwrap();
        let mut adopted = Journal::adopt(&pidfd, qemu.as_raw_fd()).unwrap();
        assert_eq!(adopted.drain().unwrap().bytes, b"two");
        adopted.commit().unwrap();
        qemu.write_all(b"three").unwrap();
        assert_eq!(adopted.drain().unwrap().bytes, b"three");
    }
}
