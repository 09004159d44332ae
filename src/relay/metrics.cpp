// The relay's numbers in the text format of Prometheus.
#include <string>
#include <vector>

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include "relay/relay.hpp"

namespace kvasir::relay {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

struct Labelled {
    const char* label;
    uint64_t value;
};

class Page {
public:
    void counter(const char* name, const char* help, uint64_t value) {
        add(name, help, MetricType::Counter, nullptr, {{"", value}});
    }
    void gauge(const char* name, const char* help, uint64_t value) {
        add(name, help, MetricType::Gauge, nullptr, {{"", value}});
    }
    void add(const char* name, const char* help, MetricType type, const char* label,
             const std::vector<Labelled>& values) {
        MetricFamily family;
        family.name = std::string("kvasir_relay_") + name;
        family.help = help;
        family.type = type;
        for (const Labelled& one : values) {
            ClientMetric metric;
            if (label != nullptr) metric.label.push_back({label, one.label});
            const auto value = static_cast<double>(one.value);
            if (type == MetricType::Counter) {
                metric.counter.value = value;
            } else {
                metric.gauge.value = value;
            }
            family.metric.push_back(std::move(metric));
        }
        families_.push_back(std::move(family));
    }
    std::string text() const { return prometheus::TextSerializer().Serialize(families_); }

private:
    std::vector<MetricFamily> families_;
};

}  // namespace

std::string prometheus_text(const RelayStats& stats) {
    const SwitchboardCounters& counters = stats.counters;
    Page page;
    page.add(
        "nodes", "Attached nodes.", MetricType::Gauge, "role",
        {{"worker", stats.workers}, {"backbone", stats.backbones}, {"observer", stats.observers}});
    page.gauge("connections", "Open connections, attached or not.", stats.connections);
    page.gauge("queued_bytes", "Bytes queued for slow receivers.", stats.queued_bytes);
    page.gauge("receive_buffer_bytes", "Bytes of frames that have half arrived or are held.",
               stats.receive_bytes);
    page.gauge("draining", "1 while nodes are told to move.", stats.draining ? 1 : 0);
    page.counter("opened_total", "Connections accepted.", counters.opened);
    page.counter("attached_total", "Nodes attached.", counters.attached);
    page.counter("refused_total", "Connections that never attached.", counters.refused);
    page.counter("closed_total", "Connections ended.", counters.closed);
    page.counter("renewed_total", "Tokens renewed on a live connection.", counters.renewed);
    page.counter("replaced_total", "Connections replaced by a newer one of their node.",
                 counters.replaced);
    page.counter("frames_total", "Frames passed on.", counters.frames_forwarded);
    page.counter("bytes_total", "Bytes of frames passed on.", counters.bytes_forwarded);
    page.counter("held_total", "Frames of workers that waited for room.", counters.held);
    page.add("told_total", "Frames answered by ERROR instead of being delivered.",
             MetricType::Counter, "code",
             {{"busy", counters.told_busy}, {"closed", counters.told_closed}});
    page.counter("introduced_total", "Pairs of nodes introduced.", counters.introduced);
    page.counter("introductions_failed_total", "Pairs not introduced for want of a handle.",
                 counters.introductions_failed);
    page.counter("unmatched_total",
                 "Nodes that met nobody, because nobody's token was for their model.",
                 counters.unmatched);
    page.add("cut_total", "Attached nodes that the relay closed.", MetricType::Counter, "reason",
             {{"silent", counters.cut_silent},
              {"slow", counters.cut_stalled},
              {"expired", counters.cut_expired},
              {"revoked", counters.cut_revoked},
              {"protocol", counters.cut_protocol},
              {"memory", stats.cut_for_memory + counters.cut_memory}});
    return page.text();
}

}  // namespace kvasir::relay
