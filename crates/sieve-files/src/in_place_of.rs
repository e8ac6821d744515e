//! What a program finds where a file of a model should be, after a fetch that did not do what was meant.

/// What a file really is, by its bytes, and how to get the file that was meant. `None` if it is none of the things that
/// are often found under a model file's name: a pointer of Git LFS, a web page, a zip archive, a byte order mark,
/// nothing or zeros.
pub fn in_place_of(bytes: &[u8]) -> Option<(&'static str, &'static str)> {
    const AGAIN: &str = "fetch or copy the file again";
    let text = bytes.trim_ascii_start();
    let begins = |with: &str| text.get(..with.len()).is_some_and(|start| start.eq_ignore_ascii_case(with.as_bytes()));
    if let Some(found) = lfs_pointer(bytes) {
        return Some(found);
    }
    if begins("<!doctype html") || begins("<html") || begins("<?xml") {
        return Some((
            "it is a web page",
            "fetch the file itself: on the hub its address contains /resolve/ where the page's contains /blob/",
        ));
    }
    if bytes.starts_with(b"PK\x03\x04") {
        return Some((
            "it is a zip archive, as PyTorch writes pickles",
            "load it with PyTorch or transformers, and save it as safetensors (save_pretrained)",
        ));
    }
    if bytes.starts_with(b"\xef\xbb\xbf") {
        return Some(("it begins with a byte order mark", "save it as UTF-8 without one"));
    }
    match bytes.iter().all(|byte| *byte == 0) {
        true if bytes.is_empty() => Some(("it is empty", AGAIN)),
        true => Some(("it contains only zeros", AGAIN)),
        false => None,
    }
}

/// What a file is that only names another one for Git LFS, by its first bytes, and how to get that one; `None` for any
/// other file.
pub fn lfs_pointer(bytes: &[u8]) -> Option<(&'static str, &'static str)> {
    bytes.trim_ascii_start().starts_with(b"version https://git-lfs").then_some((
        "it is a pointer of Git LFS, which only names the file",
        "git lfs pull in its folder fetches the file itself; so does hf download",
    ))
}

#[cfg(test)]
mod tests {
    use super::in_place_of;

    #[test]
    fn files_in_the_place_of_others_are_recognised() {
        let what = |bytes: &[u8]| in_place_of(bytes).map_or("", |(what, _)| what);
        for (bytes, word) in [
            (&b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n"[..], "Git LFS"),
            (b"\n <!DOCTYPE HTML><html>", "web page"),
            (b"<HTML>", "web page"),
            (b"<?xml version=\"1.0\"?><Error>", "web page"),
            (b"PK\x03\x04rest", "zip archive"),
            (b"\xef\xbb\xbf{}", "byte order mark"),
            (b"", "empty"),
            (&[0; 9], "zeros"),
        ] {
            assert!(what(bytes).contains(word), "{word}: {}", what(bytes));
        }
        for other in [&b"{}"[..], b"<", b"version", &[16, 0, 0, 0, 0, 0, 0, 0, b'{']] {
            assert_eq!(in_place_of(other), None);
        }
    }
}
