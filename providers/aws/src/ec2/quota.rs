//! Looks up the account's limit of vCPUs and the number in use. A failure is a fact, not a warning: no pod depends on
//! this look-up. May call DescribeInstances, and GetServiceQuota of Service Quotas.

use aws_sdk_ec2::types::{Filter, Instance, InstanceLifecycleType, Tenancy};
use futures_util::future::try_join_all;
use peerpod_provider_api::{Error, Market};
use peerpod_provider_cloud::until;
use tokio::time::Instant;

use crate::config::AwsConfig;
use crate::ec2::client::Ec2;

/// Maximum number of VMs in a page.
const PAGE: i32 = 1000;
/// Maximum number of pages. The number in use is a lower bound in an account with more VMs.
const MAX_PAGES: usize = 10;
/// Letters before the generation in the names of standard types. Im4gn and Is4gen belong to the family I.
const STANDARD: [&str; 11] = ["a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"];

/// Returns one fact for each market of the configured type, or one fact with the reason why there is none. Returns
/// nothing for a type that has another quota, and for dedicated hosts, which have quotas of their own.
pub(crate) async fn facts(ec2: &Ec2, config: &AwsConfig) -> Vec<String> {
    if !is_standard(&config.instance_type) || config.tenancy.as_deref() == Some("host") {
        return Vec::new();
    }
    let until = until().min(Instant::now() + config.quota_wait);
    let limits = config.markets.iter().map(|market| ec2.limit(code(*market), until));
    match tokio::try_join!(try_join_all(limits), usage(ec2, until)) {
        Ok((limits, usage)) => {
            config.markets.iter().zip(limits).map(|(market, limit)| usage.fact(*market, limit)).collect()
        }
        Err(error) => vec![format!("quota vCPUs of standard types: not readable ({error})")],
    }
}

/// Whether a type is of the families A, C, D, H, I, M, R, T and Z, which share a quota.
fn is_standard(machine: &str) -> bool {
    let letters = machine.split(|character: char| !character.is_ascii_lowercase()).next();
    letters.is_some_and(|letters| STANDARD.contains(&letters))
}

/// Returns the code of the quota of standard types.
const fn code(market: Market) -> &'static str {
    match market {
        Market::OnDemand => "L-1216C47A",
        Market::Spot => "L-34B43A08",
    }
}

/// vCPUs of the account's standard VMs that are pending or running.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Usage {
    on_demand: u64,
    spot: u64,
    /// Whether the numbers are lower bounds.
    is_partial: bool,
}

impl Usage {
    fn add(&mut self, vm: &Instance) {
        let machine = vm.instance_type.as_ref().map(|machine| machine.as_str()).unwrap_or_default();
        let tenancy = vm.placement.as_ref().and_then(|placement| placement.tenancy.as_ref());
        if !is_standard(machine) || tenancy == Some(&Tenancy::Host) {
            return;
        }
        let number = |value: Option<i32>| value.and_then(|value| u64::try_from(value).ok());
        let options = vm.cpu_options.as_ref();
        let vcpus = options.and_then(|one| Some(number(one.core_count)? * number(one.threads_per_core)?));
        self.is_partial |= vcpus.is_none();
        match &vm.instance_lifecycle {
            None => self.on_demand += vcpus.unwrap_or(0),
            Some(InstanceLifecycleType::Spot) => self.spot += vcpus.unwrap_or(0),
            // Capacity blocks and scheduled instances are reserved; they do not count.
            Some(_) => {}
        }
    }

    fn fact(self, market: Market, limit: f64) -> String {
        let (market, used) = match market {
            Market::OnDemand => ("on demand", self.on_demand),
            Market::Spot => ("on spot", self.spot),
        };
        let bound = if self.is_partial { "at least " } else { "" };
        format!("quota vCPUs of standard types {market}: {bound}{used} of {limit:.0} in use")
    }
}

/// Adds up the vCPUs in use. One list serves both markets.
async fn usage(ec2: &Ec2, until: Instant) -> Result<Usage, Error> {
    let states = ["pending", "running"].map(str::to_owned);
    let states = Filter::builder().name("instance-state-name").set_values(Some(states.to_vec())).build();
    let mut ask = ec2.client.describe_instances().filters(states).max_results(PAGE);
    let mut usage = Usage::default();
    for number in 0..MAX_PAGES {
        let what = "list the account's VMs";
        let page = match ec2.call("DescribeInstances", "quota", what, until, || ask.clone().send()).await {
            Ok(page) => page,
            Err(_) if number > 0 => break,
            Err(failure) => return Err(failure.into()),
        };
        let reservations = page.reservations.unwrap_or_default();
        reservations
            .into_iter()
            .flat_map(|one| one.instances.unwrap_or_default())
            .for_each(|vm| usage.add(&vm));
        match page.next_token.filter(|token| !token.is_empty()) {
            Some(next) => ask = ask.next_token(next),
            None => return Ok(usage),
        }
    }
    Ok(Usage { is_partial: true, ..usage })
}

#[cfg(test)]
mod tests {
    use aws_sdk_ec2::types::{CpuOptions, Placement};

    use super::*;

    #[test]
    fn only_families_with_the_standard_quota_count() {
        for machine in ["m6a.large", "c5.metal", "t3.micro", "im4gn.large", "d3en.xlarge", "z1d.large"] {
            assert!(is_standard(machine), "{machine}");
        }
        for machine in [
            "mac2.metal",
            "inf1.xlarge",
            "p5.48xlarge",
            "g6.xlarge",
            "hpc6a.48xlarge",
            "u-6tb1.metal",
            "dl1.24xlarge",
            "",
        ] {
            assert!(!is_standard(machine), "{machine}");
        }
    }

    #[test]
    fn each_market_has_its_own_vcpus_and_an_unknown_number_is_a_lower_bound() {
        let vm = |machine: &str| Instance::builder().instance_type(machine.into());
        let cpus = |cores, threads| CpuOptions::builder().core_count(cores).threads_per_core(threads).build();
        let host = Placement::builder().tenancy(Tenancy::Host).build();
        let mut usage = Usage::default();
        for vm in [
            vm("m6a.2xlarge").cpu_options(cpus(4, 2)),
            vm("c7g.large").cpu_options(cpus(2, 1)),
            vm("t3.large").cpu_options(cpus(1, 2)).instance_lifecycle(InstanceLifecycleType::Spot),
            vm("p5.48xlarge").cpu_options(cpus(96, 2)),
            vm("m5.large").cpu_options(cpus(1, 2)).placement(host),
            vm("m5.large").cpu_options(cpus(1, 2)).instance_lifecycle(InstanceLifecycleType::CapacityBlock),
        ] {
            usage.add(&vm.build());
        }
        assert_eq!(usage, Usage { on_demand: 10, spot: 2, is_partial: false });
        assert_eq!(
            usage.fact(Market::OnDemand, 64.0),
            "quota vCPUs of standard types on demand: 10 of 64 in use"
        );
        usage.add(&vm("m5.metal").build());
        assert_eq!(
            usage.fact(Market::Spot, 32.0),
            "quota vCPUs of standard types on spot: at least 2 of 32 in use"
        );
    }
}
