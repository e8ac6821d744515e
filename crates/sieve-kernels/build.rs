//! Embeds every file of `kernels/` as text: the table `KERNEL_FILES` of (path below `kernels/`, text).
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    let manifest =
        PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let kernels = manifest.join("../../kernels");
    let mut files = Vec::new();
    collect(&kernels, &kernels, &mut files);
    files.sort();
    let mut table = String::from("static KERNEL_FILES: &[(&str, &str)] = &[\n");
    for name in &files {
        let path = kernels
            .join(name)
            .canonicalize()
            .expect("the file was just listed");
        table.push_str(&format!(
            "    ({name:?}, include_str!({:?})),\n",
            path.display().to_string()
        ));
    }
    table.push_str("];\n");
    fs::write(out.join("kernel_files.rs"), table).expect("OUT_DIR is writable");
}

/// Lists `.cu` and `.cuh` files below `folder`, as paths relative to `root` with forward slashes.
fn collect(root: &Path, folder: &Path, files: &mut Vec<String>) {
    println!("cargo:rerun-if-changed={}", folder.display());
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    for entry in entries {
        let path = entry.expect("the folder is readable").path();
        if path.is_dir() {
            collect(root, &path, files);
        } else if path.extension().is_some_and(|e| e == "cu" || e == "cuh") {
            println!("cargo:rerun-if-changed={}", path.display());
            let relative = path.strip_prefix(root).expect("found below root");
            files.push(relative.to_string_lossy().replace('\\', "/"));
        }
    }
}
