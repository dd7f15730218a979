//! The NoCloud seed: a small FAT file system labelled `CIDATA`, made in this process
//! (<https://docs.cloud-init.io/en/latest/reference/datasources/nocloud.html>).

use std::io::{self, Cursor, Write};

use drivers_api::CloudInit;
use fatfs::{FileSystem, FormatVolumeOptions, FsOptions, format_volume};

/// The least size of an image: FAT12 with room for the three files' directory entries.
const LEAST: usize = 512 << 10;

/// The bytes of the seed's image.
///
/// # Errors
/// When the file system cannot be made; it is in memory, so that would be a fault of ours.
pub(crate) fn image(seed: &CloudInit) -> io::Result<Vec<u8>> {
    let files = [
        ("user-data", Some(seed.user_data.as_str())),
        ("meta-data", Some(seed.meta_data.as_str())),
        ("network-config", seed.network_config.as_deref()),
    ];
    let content: usize = files.iter().filter_map(|(_, text)| text.map(str::len)).sum();
    // Twice the content and a half MiB: clusters, tables and directory fit for any split into files.
    let size = (content * 2 + LEAST).next_multiple_of(LEAST);
    let mut disk = Cursor::new(vec![0; size]);
    format_volume(&mut disk, FormatVolumeOptions::new().volume_label(*b"CIDATA     "))?;
    {
        let system = FileSystem::new(&mut disk, FsOptions::new())?;
        let root = system.root_dir();
        for (name, text) in files {
            if let Some(text) = text {
                let mut file = root.create_file(name)?;
                file.write_all(text.as_bytes())?;
                file.flush()?;
            }
        }
    }
    Ok(disk.into_inner())
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn the_seed_holds_the_files_byte_for_byte_under_the_label() {
        let mut seed =
            CloudInit::new("#cloud-config\n".repeat(100_000), "instance-id: i\n".to_owned());
        seed.network_config = Some("version: 2\n".to_owned());
        let bytes = image(&seed).unwrap();
        assert_eq!(bytes, image(&seed).unwrap(), "the same seed is the same image");
        let system = FileSystem::new(Cursor::new(bytes), FsOptions::new()).unwrap();
        assert_eq!(system.volume_label(), "CIDATA");
        assert_eq!(system.read_volume_label_from_root_dir().unwrap().as_deref(), Some("CIDATA"));
        for (name, wanted) in [
            ("user-data", &seed.user_data),
            ("meta-data", &seed.meta_data),
            ("network-config", &"version: 2\n".to_owned()),
        ] {
            let mut text = String::new();
            system.root_dir().open_file(name).unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(&text, wanted);
        }
    }
}
