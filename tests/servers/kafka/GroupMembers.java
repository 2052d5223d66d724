import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.regex.Pattern;

import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.consumer.SubscriptionPattern;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/**
 * Members of consumer groups in a process of their own: the same lines in and out as those of
 * tests/integration/group_member_child.py, which says what they mean.
 */
public final class GroupMembers {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final PrintStream OUT = new PrintStream(System.out, false, StandardCharsets.UTF_8);
    private static final Duration POLL = Duration.ofMillis(100);
    private static final Duration CALL = Duration.ofSeconds(10);
    private static final Map<String, String> ASSIGNORS = Map.of(
        "range", "org.apache.kafka.clients.consumer.RangeAssignor",
        "roundrobin", "org.apache.kafka.clients.consumer.RoundRobinAssignor",
        "sticky", "org.apache.kafka.clients.consumer.StickyAssignor",
        "cooperative-sticky", "org.apache.kafka.clients.consumer.CooperativeStickyAssignor");

    public static void main(String[] arguments) throws IOException {
        Map<String, Member> members = new HashMap<>();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line; (line = lines.readLine()) != null; ) {
            JsonNode command = JSON.readTree(line);
            String name = command.get("member").asText();
            if (command.get("do").asText().equals("start")) {
                Member member = new Member(name, command);
                members.put(name, member);
                Thread thread = new Thread(member, name);
                thread.setDaemon(true);
                thread.start();
            } else {
                members.get(name).commands.add(command);
            }
        }
        System.exit(0);
    }

    private static ObjectNode event(String member, String event) {
        return JSON.createObjectNode().put("member", member).put("event", event);
    }

    /** On Linux the clock is the one that Python calls monotonic. */
    private static synchronized void say(ObjectNode event) {
        OUT.println(event.put("at", System.nanoTime()));
        OUT.flush();
    }

    private static final class Member implements Runnable, ConsumerRebalanceListener {
        private final String name;
        private final JsonNode wanted;
        private final boolean commits;
        private final ConcurrentLinkedQueue<JsonNode> commands = new ConcurrentLinkedQueue<>();
        /** Behind what was consumed, where that is not committed. */
        private final Map<TopicPartition, Long> positions = new HashMap<>();
        private KafkaConsumer<byte[], byte[]> consumer;
        private int turns = 0;

        Member(String name, JsonNode wanted) {
            this.name = name;
            this.wanted = wanted;
            this.commits = wanted.get("auto_commit_ms").isNull();
        }

        @Override
        public void run() {
            try (KafkaConsumer<byte[], byte[]> opened = new KafkaConsumer<>(properties(), new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
                consumer = opened;
                subscribe();
                say(event(name, "started"));
                for (boolean goesOn = true; goesOn; ) {
                    goesOn = turn();
                }
                say(event(name, "closing"));
            } catch (RuntimeException error) {
                say(event(name, "failed").put("error", error.getClass().getSimpleName()).put("message", trace(error)));
                return;
            }
            say(event(name, "closed"));
        }

        /** With where it comes from: what the client did not expect may be the client's own mistake. */
        private static String trace(RuntimeException error) {
            StringWriter trace = new StringWriter();
            error.printStackTrace(new PrintWriter(trace));
            return trace.toString();
        }

        private Properties properties() {
            Properties properties = new Properties();
            properties.put("bootstrap.servers", wanted.get("address").asText());
            properties.put("group.id", wanted.get("group").asText());
            properties.put("client.id", wanted.get("client_id").asText());
            properties.put("enable.auto.commit", Boolean.toString(!commits));
            properties.put("auto.offset.reset", "earliest");
            properties.put("fetch.max.wait.ms", "100");
            properties.put("fetch.min.bytes", "100000");
            properties.put("metadata.max.age.ms", "1000");
            properties.put("reconnect.backoff.max.ms", "500");
            properties.put("group.protocol", wanted.get("protocol").asText());
            if (!commits) {
                properties.put("auto.commit.interval.ms", wanted.get("auto_commit_ms").asText());
            }
            if (!wanted.get("instance").isNull()) {
                properties.put("group.instance.id", wanted.get("instance").asText());
            }
            if (wanted.get("protocol").asText().equals("classic")) {
                properties.put("partition.assignment.strategy", ASSIGNORS.get(wanted.get("assignor").asText()));
                properties.put("session.timeout.ms", wanted.get("session_ms").asText());
                properties.put("heartbeat.interval.ms", wanted.get("heartbeat_ms").asText());
            } else if (!wanted.get("assignor").isNull()) {
                properties.put("group.remote.assignor", wanted.get("assignor").asText());
            }
            return properties;
        }

        /** A pattern is the broker's to match in the one protocol and the client's in the other. */
        private void subscribe() {
            if (wanted.get("pattern").isNull()) {
                List<String> topics = new ArrayList<>();
                wanted.get("topics").forEach(topic -> topics.add(topic.asText()));
                consumer.subscribe(topics, this);
            } else if (wanted.get("protocol").asText().equals("consumer")) {
                consumer.subscribe(new SubscriptionPattern(wanted.get("pattern").asText()), this);
            } else {
                consumer.subscribe(Pattern.compile(wanted.get("pattern").asText()), this);
            }
        }

        /** Whether there is to be another. */
        private boolean turn() {
            JsonNode command = commands.poll();
            if (command != null) {
                switch (command.get("do").asText()) {
                    case "close" -> {
                        return false;
                    }
                    case "commit" -> commit(asked(command));
                    default -> answer(command);
                }
            }
            ConsumerRecords<byte[], byte[]> polled = consumer.poll(POLL);
            if (!polled.isEmpty()) {
                int age = consumer.groupMetadata().generationId();
                polled.partitions().forEach(partition -> consumed(partition, polled.records(partition), age));
            }
            if (commits && !positions.isEmpty()) {
                if (++turns % 2 == 0) {
                    commit(dirty(positions.keySet()));
                } else {
                    long sent = System.nanoTime();
                    // The callback is not told the offsets of a commit that failed, with the protocol "consumer".
                    Map<TopicPartition, OffsetAndMetadata> dirty = dirty(positions.keySet());
                    consumer.commitAsync(dirty, (offsets, error) -> committed(dirty, sent, error));
                }
            }
            return true;
        }

        private void consumed(TopicPartition partition, List<ConsumerRecord<byte[], byte[]>> records, int age) {
            positions.put(partition, records.get(records.size() - 1).offset() + 1);
            ObjectNode event = event(name, "records").put("topic", partition.topic()).put("partition", partition.partition()).put("age", age);
            ArrayNode offsets = event.putArray("offsets");
            records.forEach(record -> offsets.add(record.offset()));
            say(event);
        }

        private Map<TopicPartition, OffsetAndMetadata> dirty(Collection<TopicPartition> partitions) {
            Map<TopicPartition, OffsetAndMetadata> dirty = new HashMap<>();
            for (TopicPartition partition : partitions) {
                if (positions.containsKey(partition)) {
                    dirty.put(partition, new OffsetAndMetadata(positions.get(partition)));
                }
            }
            return dirty;
        }

        private static Map<TopicPartition, OffsetAndMetadata> asked(JsonNode command) {
            Map<TopicPartition, OffsetAndMetadata> asked = new HashMap<>();
            command.get("offsets").forEach(row ->
                asked.put(new TopicPartition(row.get(0).asText(), row.get(1).asInt()), new OffsetAndMetadata(row.get(2).asLong(), row.get(3).asText())));
            return asked;
        }

        private void commit(Map<TopicPartition, OffsetAndMetadata> offsets) {
            long sent = System.nanoTime();
            try {
                consumer.commitSync(offsets, CALL);
            } catch (RuntimeException error) {
                committed(offsets, sent, error);
                return;
            }
            committed(offsets, sent, null);
        }

        private void committed(Map<TopicPartition, OffsetAndMetadata> offsets, long sent, Exception error) {
            ObjectNode event = event(name, error == null ? "committed" : "commit failed").put("sent", sent);
            if (error != null) {
                event.put("error", error.toString());
            }
            ArrayNode rows = event.putArray("offsets");
            offsets.forEach((partition, offset) -> {
                rows.addArray().add(partition.topic()).add(partition.partition()).add(offset.offset());
                if (error == null) {
                    positions.remove(partition, offset.offset());
                }
            });
            say(event);
        }

        private void answer(JsonNode command) {
            Set<TopicPartition> partitions = new HashSet<>();
            command.get("partitions").forEach(row -> partitions.add(new TopicPartition(row.get(0).asText(), row.get(1).asInt())));
            ObjectNode event = event(name, "answer");
            ArrayNode rows = event.putArray("offsets");
            consumer.committed(partitions, CALL).forEach((partition, offset) -> {
                ArrayNode row = rows.addArray().add(partition.topic()).add(partition.partition());
                if (offset == null) {
                    row.addNull().addNull();
                } else {
                    row.add(offset.offset()).add(offset.metadata());
                }
            });
            say(event);
        }

        @Override
        public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
            changed("assigned", partitions);
        }

        @Override
        public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
            Map<TopicPartition, OffsetAndMetadata> dirty = dirty(partitions);
            if (commits && !dirty.isEmpty()) {
                commit(dirty);
            }
            changed("revoked", partitions);
        }

        @Override
        public void onPartitionsLost(Collection<TopicPartition> partitions) {
            changed("lost", partitions);
        }

        private void changed(String how, Collection<TopicPartition> partitions) {
            ObjectNode event = event(name, how);
            ArrayNode rows = event.putArray("partitions");
            for (TopicPartition partition : partitions) {
                rows.addArray().add(partition.topic()).add(partition.partition());
                if (!how.equals("assigned")) {
                    positions.remove(partition);
                }
            }
            say(event);
        }
    }
}
