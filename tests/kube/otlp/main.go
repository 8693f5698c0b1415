// The OpenTelemetry collector's own OTLP receiver, over HTTP, for the tests of traces. It prints each received request as
// one line of JSON.
package main

import (
	"context"
	"fmt"
	"os"

	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/receiver/otlpreceiver"
	"go.opentelemetry.io/collector/receiver/receivertest"
)

func main() {
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "otlp-receiver:", err)
		os.Exit(1)
	}
}

func run(address string) error {
	factory := otlpreceiver.NewFactory()
	config := factory.CreateDefaultConfig()
	http := map[string]any{"http": map[string]any{"endpoint": address}}
	if err := confmap.NewFromStringMap(map[string]any{"protocols": http}).Unmarshal(config); err != nil {
		return err
	}
	print, err := consumer.NewTraces(func(_ context.Context, traces ptrace.Traces) error {
		line, err := (&ptrace.JSONMarshaler{}).MarshalTraces(traces)
		fmt.Println(string(line))
		return err
	})
	if err != nil {
		return err
	}
	receiver, err := factory.CreateTraces(context.Background(), receivertest.NewNopSettings(factory.Type()), config, print)
	if err != nil {
		return err
	}
	if err := receiver.Start(context.Background(), componenttest.NewNopHost()); err != nil {
		return err
	}
	fmt.Println("ready")
	select {}
}
