//! Determines the prices of offerings: those of the administrator and, for spot types without one, those of EC2.
//! On-demand prices are in another API (Price List), and are list prices there. The administrator alone knows the real
//! prices of an account, with its discounts and savings plans. May call DescribeSpotPriceHistory.

use std::time::SystemTime;

use aws_sdk_ec2::types::SpotPrice;
use peerpod_provider_api::{Error, Market};
use peerpod_provider_cloud::settings::millionths;
use peerpod_provider_cloud::{Prices, until};

use crate::config::AwsConfig;
use crate::ec2::client::Ec2;

/// Maximum number of pages. 100 types in six zones have 600 lines.
const MAX_PAGES: usize = 20;

/// Returns the prices, and the error if EC2's spot prices could not be loaded completely.
pub(crate) async fn load(ec2: &Ec2, config: &AwsConfig) -> (Prices, Option<Error>) {
    let mut prices = Prices::default();
    let mut unsaid = config.instance_types.clone();
    for one in config.prices.iter().filter(|one| one.market == Market::Spot) {
        unsaid.retain(|name| *name != one.machine);
    }
    let mut error = None;
    if config.markets.contains(&Market::Spot) && !unsaid.is_empty() {
        error = spot(ec2, unsaid, &mut prices).await.err();
    }
    for one in &config.prices {
        prices.set(&one.machine, None, one.market, one.millionths);
    }
    (prices, error)
}

async fn spot(ec2: &Ec2, machines: Vec<String>, prices: &mut Prices) -> Result<(), Error> {
    let what = "look at the spot prices";
    let machines: Vec<_> = machines.iter().map(|name| name.as_str().into()).collect();
    let mut next: Option<String> = None;
    for _ in 0..MAX_PAGES {
        let ask = ec2
            .client
            .describe_spot_price_history()
            .set_instance_types(Some(machines.clone()))
            .product_descriptions("Linux/UNIX")
            // With the current time as start, EC2 returns the current prices, one for each type and zone.
            .start_time(SystemTime::now().into())
            .set_next_token(next);
        let page =
            ec2.call("DescribeSpotPriceHistory", "facts", what, until(), || ask.clone().send()).await?;
        // EC2 lists the newest price first; in `prices` the last one that is set counts.
        for (machine, zone, price) in
            page.spot_price_history.unwrap_or_default().into_iter().rev().filter_map(one)
        {
            prices.set(&machine, Some(&zone), Market::Spot, price);
        }
        next = page.next_token.filter(|token| !token.is_empty());
        if next.is_none() {
            return Ok(());
        }
    }
    Err(Error::transient(format!("{what}: more than {MAX_PAGES} pages; the first ones are used")))
}

fn one(price: SpotPrice) -> Option<(String, String, u64)> {
    let millionths = millionths(&price.spot_price?)?;
    Some((price.instance_type?.as_str().to_owned(), price.availability_zone?, millionths))
}
