//! Makes metrics and registers them in one step; the metrics that every program has; the text format 0.0.4.

use std::fmt;
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage};
use nix::sys::time::TimeVal;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::{Metric, Registry};

/// Counters that differ in one label, which has values from a fixed list.
pub type Labelled = Family<[(&'static str, &'static str); 1], Counter>;

/// Registers a new metric with its name and help text, and returns it.
pub fn register<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

/// Registers the ends of a program's certificates. `read` returns them by name at each scrape.
pub fn expiries(registry: &mut Registry, read: impl Fn() -> Ends + Send + Sync + 'static) {
    registry.register_collector(Box::new(Expiries(Box::new(read))));
}

/// Ends of certificates in use, by a name from a fixed list.
pub type Ends = Vec<(&'static str, SystemTime)>;

struct Expiries(Box<dyn Fn() -> Ends + Send + Sync>);

impl fmt::Debug for Expiries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Expiries")
    }
}

impl Collector for Expiries {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let ends = (self.0)();
        if ends.is_empty() {
            return Ok(());
        }
        let kind = ConstGauge::new(0i64).metric_type();
        let (name, help) = (
            "peerpod_certificate_expiry_timestamp_seconds",
            "End of the validity of a certificate in use, in seconds since 1970",
        );
        let mut family = encoder.encode_descriptor(name, help, None, kind)?;
        for (certificate, end) in ends {
            let seconds = end.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
            let gauge = ConstGauge::new(i64::try_from(seconds).unwrap_or(i64::MAX));
            gauge.encode(family.encode_family(&[("certificate", certificate)])?)?;
        }
        Ok(())
    }
}

/// Returns a registry with the metrics that every program has: its build and its use of the machine.
pub fn program(name: &'static str, version: &'static str) -> Registry {
    let mut registry = Registry::default();
    let build: Family<[(&str, &str); 2], Gauge> =
        register(&mut registry, "peerpod_build_info", "1, with the program and its version as labels");
    build.get_or_create(&[("program", name), ("version", version)]).set(1);
    registry.register_collector(Box::new(Process { started: SystemTime::now() }));
    registry
}

/// Reads the use of the machine by this process at each scrape. A figure that the kernel does not show is left out.
#[derive(Debug)]
struct Process {
    started: SystemTime,
}

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let seconds = |time: TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
        if let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) {
            let used = ConstCounter::new(seconds(usage.user_time()) + seconds(usage.system_time()));
            let help = "CPU time of the process, in seconds";
            let descriptor =
                encoder.encode_descriptor("process_cpu_seconds", help, None, used.metric_type())?;
            used.encode(descriptor)?;
        }
        let started = self.started.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let [virtual_memory, resident] = memory();
        for (name, help, value) in [
            ("process_start_time_seconds", "Start of the process, in seconds since 1970", Some(started)),
            ("process_virtual_memory_bytes", "Virtual memory of the process", virtual_memory),
            ("process_resident_memory_bytes", "Resident memory of the process", resident),
            ("process_open_fds", "Open file descriptors", open_descriptors()),
            (
                "process_max_fds",
                "Limit of open file descriptors",
                getrlimit(Resource::RLIMIT_NOFILE).ok().map(|(limit, _)| limit),
            ),
        ] {
            let Some(value) = value.and_then(|value| i64::try_from(value).ok()) else { continue };
            let gauge = ConstGauge::new(value);
            let descriptor = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(descriptor)?;
        }
        Ok(())
    }
}

/// Returns the virtual and the resident memory in bytes.
fn memory() -> [Option<u64>; 2] {
    let text = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let mut pages = text.split(' ').map(|word| word.parse::<u64>().ok());
    let page = rustix::param::page_size() as u64;
    [(); 2].map(|()| pages.next().flatten().map(|count| count.saturating_mul(page)))
}

/// Returns the number of open descriptors. Since Linux 6.2 it is the size of the folder, which the relay, whose Landlock
/// rules refuse the list, may read as well.
fn open_descriptors() -> Option<u64> {
    const FOLDER: &str = "/proc/self/fd";
    match fs::metadata(FOLDER).ok()?.len() {
        // The listing opens one more.
        0 => Some((fs::read_dir(FOLDER).ok()?.count() as u64).saturating_sub(1)),
        count => Some(count),
    }
}

/// Converts text in the format OpenMetrics 1.0 to the text format 0.0.4 of Prometheus, in which the name of a counter
/// ends in `_total` and units are not known.
pub fn plain(openmetrics: &str) -> String {
    let mut out = String::with_capacity(openmetrics.len());
    let mut help = None;
    for line in openmetrics.lines() {
        if let Some(text) = line.strip_prefix("# HELP ") {
            help = text.split_once(' ');
            continue;
        }
        let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|text| text.split_once(' ')) else {
            if !line.starts_with('#') {
                out.extend([line, "\n"]);
            }
            continue;
        };
        let (ending, kind) = match kind {
            "counter" => ("_total", kind),
            "info" => ("_info", "gauge"),
            "unknown" => ("", "untyped"),
            _ => ("", kind),
        };
        if let Some((_, help)) = help.take().filter(|(of, _)| *of == name) {
            out.extend(["# HELP ", name, ending, " ", help, "\n"]);
        }
        out.extend(["# TYPE ", name, ending, " ", kind, "\n"]);
    }
    out
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;

    use super::*;

    fn text(registry: &Registry) -> String {
        let mut text = String::new();
        encode(&mut text, registry).unwrap();
        plain(&text)
    }

    #[test]
    fn every_program_shows_its_build_and_its_use_of_the_machine() {
        let text = text(&program("peerpod-x", "1.2.3"));
        assert!(text.contains("peerpod_build_info{program=\"peerpod-x\",version=\"1.2.3\"} 1\n"), "{text}");
        for name in [
            "process_cpu_seconds_total",
            "process_start_time_seconds",
            "process_virtual_memory_bytes",
            "process_resident_memory_bytes",
            "process_open_fds",
            "process_max_fds",
        ] {
            let found = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok());
            assert!(found.is_some_and(|value| value > 0.0), "{name} in {text}");
        }
    }

    #[test]
    fn open_descriptors_are_counted() {
        let before = open_descriptors().unwrap();
        let files: Vec<_> = (0..100).map(|_| fs::File::open("/dev/null").unwrap()).collect();
        // Other tests of this process open and close some.
        assert!(open_descriptors().unwrap() >= before + 50);
        drop(files);
    }

    #[test]
    fn the_old_format_names_counters_by_their_series() {
        let openmetrics = "# HELP a Things.\n# TYPE a counter\na_total{x=\"y\"} 3\n# HELP b_seconds S.\n\
            # TYPE b_seconds gauge\n# UNIT b_seconds seconds\nb_seconds 1.5\n# TYPE c unknown\nc 1\n# EOF\n";
        let expected = "# HELP a_total Things.\n# TYPE a_total counter\na_total{x=\"y\"} 3\n# HELP b_seconds S.\n\
            # TYPE b_seconds gauge\nb_seconds 1.5\n# TYPE c untyped\nc 1\n";
        assert_eq!(plain(openmetrics), expected);
    }
}
